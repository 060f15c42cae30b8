"""bytes: what each method sends against closed forms, methods that are the same in a special case,
and what the library does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from playground.lessons.bytes import lesson

program: Any = lesson
NUMBERS = program.CLASSES * program.FEATURES
STEPS, H = program.STEPS, program.H


def in_float64(rank: int, size: int, work: Any, *args: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return work(rank, size, *args)
    finally:
        torch.set_default_dtype(torch.float32)


def curves(rank: int, size: int) -> dict[str, list[tuple[float, float, float]]]:
    methods = ("alone", "data_parallel", "local_sgd", "diloco", "top_k", "power_sgd")
    return {name: program.measure(getattr(program, name), rank, size)[1] for name in methods}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_each_method_sends_is_its_closed_form(size: int, world: Worlds) -> None:
    """Of numbers of 8 bytes, and of places of 4: what a rank gives to an all_reduce, 2 (N - 1) / N
    times, and to an all_gather, N - 1 times."""
    vectors = program.CLASSES + program.FEATURES
    ring = 2 * (size - 1) / size
    sent = {
        "alone": 0,
        "data_parallel": ring * 8 * NUMBERS * STEPS,
        "local_sgd": ring * 8 * NUMBERS * STEPS / H,
        "diloco": ring * 8 * NUMBERS * STEPS / H,
        "top_k": (size - 1) * 12 * (NUMBERS // program.ONE_IN) * STEPS,
        "power_sgd": ring * 8 * (2 * NUMBERS + vectors * (STEPS - 2)),
    }
    for found in world(size, timeout=120).run(in_float64, curves):
        for name, curve in found.items():
            kb, ms, _ = curve[-1]
            assert 1000 * kb == pytest.approx(sent[name])
            assert ms == pytest.approx(STEPS * program.COMPUTE + 8 * kb / program.MBITS)
            assert len(curve) == STEPS


def test_fewer_bytes_reach_the_same_loss(world: Worlds) -> None:
    """What the chapter tells of two ranks, on rank 0."""
    found = world(2, timeout=120).run(in_float64, curves)[0]
    reached = {
        name: next((kb for kb, _, loss in curve if loss < program.TARGET), None)
        for name, curve in found.items()
    }
    assert reached.pop("alone") is None
    full = reached.pop("data_parallel")
    assert full
    assert all(kb and kb < full / 4 for kb in reached.values())


def weights_of(rank: int, size: int, method: str, **constants: float) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(program, name, value)
        weight: torch.Tensor = program.measure(getattr(program, method), rank, size)[0]
        return weight


def special_cases(rank: int, size: int) -> list[float]:
    """Everything sent by top-k is data parallelism; and an average after every step nearly is."""
    plain = weights_of(rank, size, "data_parallel")
    others = [
        weights_of(rank, size, "top_k", ONE_IN=1),
        weights_of(rank, size, "local_sgd", H=1),
    ]
    return [(other - plain).abs().max().item() for other in others]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_methods_that_leave_nothing_out_are_data_parallelism(size: int, world: Worlds) -> None:
    for differences in world(size, timeout=120).run(in_float64, special_cases):
        assert max(differences) < 1e-12


def by_torch_s_averager(model: Any, optimizer: Any, batches: Any, link: Any) -> Any:
    averager = PeriodicModelAverager(period=H, warmup_steps=H - 1)
    for _ in program.alone(model, optimizer, batches, link):
        averager.average_parameters(model.parameters())
        yield


def difference_from_the_averager(rank: int, size: int) -> float:
    ours, torch_s = (
        program.measure(method, rank, size)[0]
        for method in (program.local_sgd, by_torch_s_averager)
    )
    return float((ours - torch_s).abs().max())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_local_sgd_is_what_torch_s_averager_does(size: int, world: Worlds) -> None:
    for difference in world(size).run(in_float64, difference_from_the_averager):
        assert difference < 1e-12


def classes_of(rank: int, size: int) -> list[float]:
    own = torch.zeros(program.CLASSES)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "STEPS", 4)
        method = program.alone

        def look(model: nn.Module, optimizer: Any, batches: Any, link: Any) -> Any:
            seen.extend(labels for _, labels in batches)
            return method(model, optimizer, batches, link)

        program.measure(look, rank, size)
    own[torch.cat(seen)] = 1
    dist.all_reduce(own)
    counts: list[float] = own.tolist()
    return counts


def test_each_class_is_one_rank_s(world: Worlds) -> None:
    assert max(world(2).run(classes_of)[0]) == 1
