"""The pytest plugin, as a project that installed the package sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

pytest_plugins = ["pytester"]

MODULE = """
import time
import torch, torch.distributed as dist
from playground.runtime import RankTimeout

def everybodys_sum(rank, size, factor):
    tensor = torch.tensor([rank + 1.0]) * factor
    dist.all_reduce(tensor)
    return tensor.item()

def hang(rank, size):
    if rank == 1:
        time.sleep(1000)
    dist.barrier()

def raise_on_one(rank, size):
    if rank == 1:
        raise LookupError("not here")
    dist.barrier()

def test_sum(world):
    assert world(2).run(everybodys_sum, 10) == [30.0] * 2

def test_hang(world):
    world(2, timeout=1).run(hang)

def test_raise(world):
    world(2).run(raise_on_one)

def test_wrong(world):
    assert world(2).run(everybodys_sum, 1) == [4.0, 4.0]

def test_after_all_that(world):
    assert world(4).run(everybodys_sum, 1) == [10.0] * 4
"""


@pytest.fixture
def _restored_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.mark.usefixtures("_restored_path")
def test_a_failing_world_fails_its_own_test_only(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=MODULE)
    result = pytester.runpytest_inprocess("-q", "-p", "no:randomly")
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "E*RankTimeout: no sign of life for 1 s from ranks 0, 1 of 2*",
            "*rank 1 stands at:*",
            "*time.sleep(1000)*",
            "E*RankFailed: rank 1 of 2 failed: LookupError: not here",
            "*assert *3.0, 3.0* == *4.0, 4.0*",
        ]
    )
