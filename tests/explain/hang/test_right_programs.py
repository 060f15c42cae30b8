"""Whatever runs on torch alone runs here: right programs that look wrong, and PyTorch's own tests.
None of them is ended, accused or warned of."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import drawn_steps
import pytest
import torch
import torch.distributed as dist
import torch_tests
from eager import Looks, eager
from right_programs import PROGRAMS
from torch.distributed import distributed_c10d

from playground import Deadlock, launch
from playground.explain.hang import Kind
from playground.explain.hang.box import SWITCH
from playground.tap import METHODS

RUNS = int(os.environ.get("PLAYGROUND_TEST_RUNS", "20"))
"""How often each right program runs in the stress tier."""
TIMEOUT = 300.0
"""Seconds, above what any of them takes on the busiest machine."""
QUICK = (
    "unknown_thread_sends_main_in_a_collective", "callback_sends_main_returned", "another_number",
    "retry",
)  # fmt: skip
"""One for each source of progress."""
DRAWN, PIECE = int(os.environ.get("PLAYGROUND_TEST_DRAWN", "100000")), 500
"""Programs that are drawn in the stress tier, and how many of them run in one launch."""
NOT_OFFERED = {"record_comm", "gather_single", "gather_into_tensor", "shrink_group"}
SYNONYMS = {"all_gather_single_coalesced", "reduce_scatter_single_coalesced"}
"""Newer names of methods that are drawn, and of one that does the same."""


def run(name: str) -> None:
    fn, size, args = PROGRAMS[name]
    assert launch(fn, size, args=args, timeout=TIMEOUT, fresh=True) == [None] * size


@pytest.mark.parametrize("name", QUICK)
def test_right_programs_are_not_accused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run(name)
    assert caplog.records == []


@pytest.mark.stress
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_are_never_accused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(RUNS):
        run(name)
    assert caplog.records == []


def run_drawn(first: int, count: int, size: int, **more: Any) -> Looks:
    """Run the programs of so many seeds, under the eyes of a launcher that looks all the time."""
    with eager() as looks:
        steps = launch(
            drawn_steps.run, size, args=(range(first, first + count), *more.values()),
            timeout=drawn_steps.WORLD_LIMIT,
        )  # fmt: skip
    assert len({*steps}) == 1
    return looks


def test_drawn_programs_are_right_and_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    assert run_drawn(0, 12, 3).looks > 0
    assert caplog.records == []


@pytest.mark.stress
@pytest.mark.parametrize("piece", range(DRAWN // PIECE))
def test_many_drawn_programs_are_right_and_not_accused(
    piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In every eighth piece the flight recorder is given cause to doubt; in another the program
    forms its world itself, where gloo's has been launched."""
    way: dict[str, Any] = {
        "doubtful": piece % 8 == 7,
        "own_world": "gloo" if piece % 8 == 6 else "",
    }
    run_drawn(PIECE * piece, PIECE, 2 + piece % 3, **way)
    assert caplog.records == []


def drawn_with_a_mistake(rank: int, size: int, count: int) -> None:
    """Right ones, and then rank 0 waits for a message of a rank that waits for it in a
    collective."""
    drawn_steps.run(rank, size, range(count))
    if rank == 0:
        dist.recv(torch.zeros(3), 1)
    dist.all_reduce(torch.zeros(3))


def test_a_deadlock_after_drawn_programs_is_proved() -> None:
    """So one that is wrong would have been, too."""
    with eager() as looks, pytest.raises(Deadlock) as caught:
        launch(drawn_with_a_mistake, 3, args=(4,), timeout=drawn_steps.WORLD_LIMIT)
    assert caught.value.diagnosis.kind == Kind.ABSENT
    assert 0 in caught.value.diagnosis.culprits
    assert looks.suspicions > 0


def test_all_calls_are_drawn() -> None:
    """What torch.distributed and its groups offer to call stands in the steps; what does not, no
    backend here has."""
    words = {*re.findall(r"\w+", inspect.getsource(drawn_steps))}
    # which warns when it is looked at
    functions = (name for name in distributed_c10d.__all__ if name != "reduce_op")
    offered = {name for name in functions if inspect.isfunction(getattr(distributed_c10d, name))}
    assert {
        name for name in offered - words if not name.startswith(("get_", "is_", "supports_"))
    } <= NOT_OFFERED
    assert {*METHODS} - words <= SYNONYMS


def run_torch_tests(names: Iterable[str] = (), box: str = "1") -> dict[str, str]:
    command = [sys.executable, torch_tests.__file__, *names]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {SWITCH: box}
    )
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.fixture(scope="module")
def passed_alone() -> list[str]:
    """PyTorch's tests that pass without flight recorders."""
    return [name for name, outcome in run_torch_tests(box="0").items() if outcome == "passed"]


@pytest.mark.stress
def test_torchs_own_tests_pass(passed_alone: list[str]) -> None:
    assert len(passed_alone) >= 80
    outcomes = run_torch_tests(passed_alone)
    assert {name: each for name, each in outcomes.items() if each != "passed"} == {}
