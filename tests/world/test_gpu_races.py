"""On simulated GPUs a missing wait shows in every run, and is told with both lines; a program that
waits is told nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from fixtures import Worlds
from gpu_races import (
    FREED,
    OF_THE_HOST,
    RACES,
    RACES_OF_RANKS,
    RIGHT,
    RIGHT_OF_RANKS,
    lines_of,
    receive_without_wait,
    run_all,
    run_all_of_ranks,
)
from gpus import COLD

from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]


def name(program: Callable[..., Any]) -> str:
    return program.__name__


FIXES = {
    "freed": "call x.record_stream(torch.cuda.current_stream()) at ",
    "host": "call torch.cuda.synchronize() before ",
    "call": "call wait() of the Work of ",
    "stream": "call torch.cuda.current_stream().wait_stream(s) before ",
}
"""By kind of race, what is told to do."""


def kind_of(program: Callable[..., Any], said: str) -> str:
    if program in FREED:
        return "freed"
    if program in OF_THE_HOST:
        return "host"
    return "call" if "after nccl" in said else "stream"


def assert_told(program: Callable[[], Any], returned: Any, told: list[str]) -> None:
    first, second = lines_of(program)
    [said] = [each for each in told if re.search(rf"{second} .* after .*{first},", each)]
    assert said.partition("To fix it, ")[2].startswith(FIXES[kind_of(program, said)]), told
    if returned is not None:
        found, with_the_wait = returned
        assert found != with_the_wait


@pytest.mark.parametrize("program", RACES, ids=name)
def test_a_missing_wait_shows_and_is_told_with_both_lines(program: Callable[[], Any]) -> None:
    [(returned, told)] = run_all([program])
    assert_told(program, returned, told)


@pytest.mark.parametrize("program", RIGHT, ids=name)
def test_who_waits_is_told_nothing(program: Callable[[], Any]) -> None:
    [((found, expected), told)] = run_all([program])
    assert (found, told) == (expected, [])


def test_so_it_is_with_collectives(world: Worlds) -> None:
    ranks = world(2, backend="nccl", timeout=COLD).run(run_all_of_ranks)
    for rank, (races, right) in enumerate(ranks):
        for program, (returned, told) in zip(RACES_OF_RANKS, races, strict=True):
            if program is receive_without_wait and rank == 0:  # it sends
                assert told == []
            else:
                assert_told(program, returned, told)
        for program, ((found, expected), told) in zip(RIGHT_OF_RANKS, right, strict=True):
            assert (program.__name__, found, told) == (program.__name__, expected, [])
