"""Whatever runs on torch alone runs here: right programs that look wrong, and PyTorch's own tests. None of them is
ended, accused or warned of, on gloo or on shm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch_tests
from ranks import needs_shm
from right_programs import PROGRAMS

from playground import launch
from playground.runtime.black_box.box import SWITCH

RUNS = int(os.environ.get("PLAYGROUND_TEST_RUNS", "20"))
"""How often each right program runs in the stress tier."""
TIMEOUT = 300.0
"""Seconds, above what any of them takes on the busiest machine."""
BACKENDS = ["gloo", pytest.param("shm", marks=needs_shm)]
QUICK = (
    "unknown_thread_sends_main_in_a_collective", "callback_sends_main_returned", "another_number", "retry",
)  # fmt: skip
"""One for each source of progress."""
NAMES_A_BACKEND = {"test_get_backend", "test_ddp_logging_data_cpu"}
"""Tests of PyTorch that compare the backend's name with gloo."""


def run(name: str, backend: str) -> None:
    fn, size, args = PROGRAMS[name]
    assert launch(fn, size, args=args, backend=backend, timeout=TIMEOUT, fresh=True) == [None] * size


@pytest.mark.parametrize("name", QUICK)
def test_right_programs_are_not_accused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run(name, "gloo")
    assert caplog.records == []


@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_are_never_accused(name: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(RUNS):
        run(name, backend)
    assert caplog.records == []


def run_torch_tests(backend: str, names: Iterable[str] = (), box: str = "1") -> dict[str, str]:
    command = [sys.executable, torch_tests.__file__, backend, *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {SWITCH: box})
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.fixture(scope="module")
def passed_alone() -> list[str]:
    """PyTorch's tests that pass without black boxes."""
    return [name for name, outcome in run_torch_tests("gloo", box="0").items() if outcome == "passed"]


@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_own_tests_pass(backend: str, passed_alone: list[str]) -> None:
    assert len(passed_alone) >= 80
    outcomes = run_torch_tests(backend, passed_alone)
    expected = NAMES_A_BACKEND if backend == "shm" else set()
    failures = {name: outcome for name, outcome in outcomes.items() if outcome != "passed" and name not in expected}
    assert failures == {}
