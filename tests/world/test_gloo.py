"""gloo: when ranks connect, and what it says of a rank that did not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.world.backends import BACKENDS


@pytest.mark.parametrize(
    ("value", "later"), [(None, False), ("0", False), ("1", True), ("TRUE", True)]
)
def test_ranks_of_gloo_connect_later_if_torch_is_told_so(
    value: str | None, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", value or "")
    assert BACKENDS["gloo"].connects_later() is later


def name_the_implementation(rank: int, size: int) -> str:
    return BACKENDS["gloo"].implementation()


def test_the_class_that_does_the_work_is_named(world: Worlds) -> None:
    assert world(1).run(name_the_implementation) == ["ProcessGroupGloo"]


def test_a_rank_that_gloo_waits_for_in_vain_is_named_in_words() -> None:
    error = RuntimeError("wait timeout after 4000ms, keys: /attempt 0/group 1//cpu//0/2")
    words = "rank 2 came to the meeting, but did not connect within 4 s"
    assert BACKENDS["gloo"].explain_init_failure(error) == words
    assert BACKENDS["gloo"].explain_init_failure(RuntimeError("")) == "RuntimeError('')"


def uses_cuda(rank: int, size: int) -> bool:
    """Whether a rank on gloo, having worked, has touched a GPU."""
    tensor = torch.ones(1000)
    for name in ALGORITHMS:
        load_all_reduce(name)(tensor)
    dist.all_reduce(tensor)
    return torch.cuda.is_initialized()


@pytest.mark.gpu
def test_gloo_leaves_the_gpus_alone(world: Worlds) -> None:
    assert world(2).run(uses_cuda) == [False, False]
    assert BACKENDS["gloo"].check(2) == ""
