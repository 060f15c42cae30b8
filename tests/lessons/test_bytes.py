"""The lesson bytes: what is sent against closed forms, DiLoCo against torch's periodic averaging,
compressors against what they may lose, and error feedback."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from playground.lessons.bytes import further, lesson
from playground.lessons.bytes.further import RUNGS
from playground.lessons.bytes.lesson import STEPS, DiLoCo, Wire

NUMEL = sum(param.numel() for param in lesson.new_model().parameters())
SHAPES = ((7,), (8,), (64,), (130,), (5, 3), (16, 64), (128, 32))


def test_each_rung_costs_what_it_should_and_feedback_restores_what_compression_loses(
    world: Worlds,
) -> None:
    for values in world(2, timeout=120).run(further.ladder):
        rungs = values["rungs"]
        assert rungs.keys() == RUNGS.keys()
        for name, times in (("DDP, AdamW", STEPS), ("H = 1", STEPS), ("H = 8", 8), ("H = 32", 2)):
            sent = 4 * NUMEL * times
            assert rungs[name]["kB"] == pytest.approx(sent / 1000, abs=0.06)
            seconds = STEPS * further.COMPUTING + sent * 8 / 10e6
            assert rungs[name]["seconds"] == pytest.approx(seconds, abs=0.006)
            assert rungs[name]["loss"] < 2 * rungs["DDP, AdamW"]["loss"]
        assert rungs["alone"]["kB"] == 0
        assert rungs["alone"]["loss"] > 4 * rungs["DDP, AdamW"]["loss"]
        plain = rungs["DDP, SGD"]
        assert plain["loss"] == plain["fed_back"]
        assert plain["error"] == 0 < rungs["int8"]["error"] < 0.01 < rungs["rank 2"]["error"]
        assert rungs["rank 2"]["error"] < rungs["rank 1"]["error"] < 1
        for name in ("sign", "top 2 %", "rank 1", "rank 2"):
            rung = rungs[name]
            assert rung["kB"] < plain["kB"] / 7
            assert rung["fed_back"] < 1.1 * plain["loss"] < rung["loss"]
            assert rung["at_0.3_s"] < 0.7 * plain["at_0.3_s"]
            assert rung["at_50_kB"] < 0.5 * plain["at_50_kB"]
        for name in ("H = 8", "H = 32"):
            assert rungs[name]["at_0.3_s"] < 0.7 * rungs["DDP, AdamW"]["at_0.3_s"]
            assert rungs[name]["at_50_kB"] < 0.5 * rungs["DDP, AdamW"]["at_50_kB"]
        for name in ("sign", "H = 32"):  # which use up neither budget
            end = rungs[name]["fed_back"] or rungs[name]["loss"]
            assert rungs[name]["at_0.3_s"] == rungs[name]["at_50_kB"] == end


def averaged_by_torch(rank: int, size: int) -> list[list[float]]:
    """After ten steps: DiLoCo whose outer step is the mean itself, and torch's averager."""
    ours = lesson.new_model()
    theirs = copy.deepcopy(ours)
    outer, wire = DiLoCo(ours, 5), Wire()
    outer.optimizer = torch.optim.SGD(outer.outer, lr=1.0)
    averager = PeriodicModelAverager(period=5, warmup_steps=4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(10):
        inputs, labels = lesson.batch_of(step, rank, size)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        outer.after_step(wire)
        averager.average_parameters(theirs.parameters())
    return [
        torch.nn.utils.parameters_to_vector(model.parameters()).tolist() for model in (ours, theirs)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_diloco_with_plain_outer_steps_is_torch_s_averaging(size: int, world: Worlds) -> None:
    for ours, theirs in world(size).run(averaged_by_torch):
        assert ours == pytest.approx(theirs, abs=1e-6)


def compress_all(rank: int, size: int) -> list[tuple[str, tuple[int, ...], float, int, int]]:
    """For each method and shape: how far the result is from the mean of what the ranks say they
    have sent, and the bytes counted and expected."""
    found: list[tuple[str, tuple[int, ...], float, int, int]] = []
    methods = {name: rung.compress for name, rung in RUNGS.items() if rung.compress}
    for method, compress in methods.items():
        for shape in SHAPES:
            torch.manual_seed(rank)
            grad, wire = torch.randn(shape), Wire()
            kept = grad.clone()
            mean, own = compress(grad, wire)
            assert torch.equal(grad, kept), "the gradient itself stays as it is"
            assert mean.shape == own.shape == grad.shape
            off = (Wire().mean(own) - mean).abs().max().item()
            found.append((method, shape, off, wire.bytes, expected_bytes(method, grad)))
    return found


def expected_bytes(method: str, grad: torch.Tensor) -> int:
    numel = grad.numel()
    if method.startswith("rank") and grad.dim() == 2:
        return 4 * int(method[-1]) * sum(grad.shape)
    return {
        "int8": 64 * -(-numel // 64) + 4 * -(-numel // 64),
        "sign": -(-numel // 8) + 4,
        "top 2 %": 8 * max(1, numel // 50),
    }.get(method, 4 * numel)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_result_is_the_mean_of_what_was_sent_and_counted(size: int, world: Worlds) -> None:
    for found in world(size).run(compress_all):
        assert len(found) == 7 * len(SHAPES)
        for method, shape, off, counted, expected in found:
            assert off < 1e-5, (method, shape)
            assert counted == expected, (method, shape)


def matrices_of_low_rank(rank: int, size: int) -> list[float]:
    """How far the mean of matrices of rank one and two is from what is sent by as many columns."""
    apart = []
    for columns in (1, 2):
        torch.manual_seed(5)  # the same space on all ranks
        left, right = torch.randn(20, columns), torch.randn(columns, 12)
        grad = (rank + 1.0) * left @ right
        mean, _ = further.power_sgd(grad, Wire(), columns=columns)
        exact = Wire().mean(grad)
        apart.append(((mean - exact).norm() / exact.norm()).item())
    return apart


def test_power_sgd_is_exact_for_matrices_of_its_rank(world: Worlds) -> None:
    for apart in world(2).run(matrices_of_low_rank):
        assert max(apart) < 1e-5


def labels_of(rank: int, size: int) -> list[Any]:
    _, labels = lesson.batch_of(0, rank, size)
    own = torch.zeros(lesson.CLASSES).index_fill(0, labels, 1)
    dist.all_reduce(own)
    return own.tolist()


def test_each_class_is_one_rank_s(world: Worlds) -> None:
    assert max(world(2).run(labels_of)[0]) == 1
