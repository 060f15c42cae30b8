"""Faults on simulated GPUs: each is found and named by its kind and its line, and right programs of
the same shapes are told nothing. Missing waits are in test_gpu_races.py, and calls on nccl that do
not match in tests/explain/hang/test_nccl_mistakes.py."""

from __future__ import annotations

import os
from collections import Counter

import gpu_races
import nccl_mistakes
import pytest
from fixtures import Worlds
from gpu_faults import (
    ANOTHER_GPU,
    CPU_TENSOR,
    FAULTS,
    OPEN_GROUP,
    RIGHT,
    TWO_DEVICES,
    Fault,
    begin_and_never_end,
    run_fault,
    run_faults,
    run_right,
    stays,
)
from gpus import COLD

from playground.explain.hang import Kind
from playground.world import RankFailed
from playground.world.backends import find_cure
from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]


def assert_named(fault: Fault, told: str, line: str) -> None:
    assert fault.told in told, fault.program.__name__
    assert line == fault.line, fault.program.__name__
    if fault.kind == CPU_TENSOR:
        assert ".cuda()" in find_cure(RuntimeError(told)), told


def test_faults_are_named_by_kind_and_line(world: Worlds) -> None:
    found = [each for each in FAULTS if stays(each, "nccl")]
    for ranks in world(2, backend="nccl", timeout=COLD).run(run_faults, "nccl"):
        for fault, (told, line) in zip(found, ranks, strict=True):
            assert_named(fault, told, line)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            each,
            id=each.program.__name__,
            marks=[pytest.mark.stress] * (each.program is not begin_and_never_end),
        )
        for each in FAULTS
        if each.told and not each.fails_alone and not stays(each, "nccl")
    ],
)
def test_faults_that_break_their_world_are_named(fault: Fault, world: Worlds) -> None:
    ranks = world(2, backend=fault.backend, timeout=COLD, fresh=True)
    for told, line in ranks.run(run_fault, FAULTS.index(fault)):
        assert_named(fault, told, line)


@pytest.mark.stress
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(each, id=each.program.__name__)
        for each in FAULTS
        if each.fails_alone or stays(each, "nccl")
    ],
)
def test_a_run_ends_with_the_error_and_its_line(fault: Fault, world: Worlds) -> None:
    with pytest.raises(RankFailed) as caught:
        world(2, backend=fault.backend, timeout=COLD).run(fault.program)
    file, _, number = fault.line.partition(":")
    assert fault.told in str(caught.value)
    assert f'{file}", line {number}, in {fault.program.__name__}' in caught.value.traceback


def test_right_programs_are_told_nothing(world: Worlds) -> None:
    for ranks in world(2, backend="nccl", timeout=COLD).run(run_right):
        for program, (told, _) in zip(RIGHT, ranks, strict=True):
            assert not told, program.__name__


def test_the_tables_have_faults_of_every_kind() -> None:
    kinds = Counter[str](each.kind for each in FAULTS)
    kinds.update(each.kind for each in nccl_mistakes.MISTAKES)
    at_least = {
        TWO_DEVICES: 5, ANOTHER_GPU: 5, CPU_TENSOR: 5, OPEN_GROUP: 3, Kind.OPEN: 1,
        Kind.COLLECTIVES: 2, Kind.SHAPES: 1, Kind.SIZES: 1, Kind.DTYPES: 1, Kind.ENDED: 5,
        Kind.GROUPS: 3,
    }  # fmt: skip
    assert all(kinds[kind] >= number for kind, number in at_least.items()), kinds
    races = [*gpu_races.RACES, *gpu_races.RACES_OF_RANKS]
    right = [*RIGHT, *gpu_races.RIGHT, *gpu_races.RIGHT_OF_RANKS, *nccl_mistakes.RIGHT]
    assert len(races) + kinds.total() >= 40
    assert len(right) >= 40
