"""Backends by name, what they wait for, and what is none of their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.world import UsageError
from playground.world.backends import BACKENDS, backend_for, get_backend, refusal

NCCL = BACKENDS["nccl"]


def test_backends_by_name() -> None:
    assert {name: backend.device_type for name, backend in BACKENDS.items()} == {
        "gloo": "cpu", "nccl": "cuda",
    }  # fmt: skip
    assert backend_for("cuda") is NCCL
    with pytest.raises(UsageError, match="'smoke signals' is unknown: choose one of gloo, nccl"):
        get_backend("smoke signals")


def test_only_a_backend_of_gpus_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited_for.append("cuda"))
    BACKENDS["gloo"].synchronize()
    assert waited_for == []
    NCCL.synchronize()
    assert waited_for == ["cuda"]


class Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        return one

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this is not supported")


def refuse_in_torch(rank: int, size: int) -> list[str]:
    """What the backend refuses, and what code of ours does that torch calls, or nobody."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND),
        lambda: Hooked.apply(torch.ones(1, requires_grad=True)).backward(),
    ]
    words = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        words.append(refusal(caught.value))
    return [*words, refusal(RuntimeError("this is not supported"))]


def test_what_the_program_raises_is_no_refusal(world: Worlds) -> None:
    assert (
        world(2).run(refuse_in_torch)
        == [["Cannot use ReduceOp.BAND with non-integral dtype", "", ""]] * 2
    )
