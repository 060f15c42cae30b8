"""A signal to a process of a run at a random moment, its start above all: nothing stays, one line says why."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import ENOUGH, catches_signals, session_ends, session_members

Start = Callable[..., "subprocess.Popen[str]"]
RUN = ("hello", "-n", "2", "--json")
LONGEST = 4.0
"""Seconds within which the signal is sent: about what the run takes on a busy machine."""
IN_STRESS = 200
FAULTS = [
    ("launcher", signal.SIGKILL),
    ("launcher", signal.SIGTERM),
    ("launcher", signal.SIGHUP),
    ("launcher", signal.SIGINT),
    ("fork server", signal.SIGKILL),
    ("fork server", signal.SIGSTOP),
    ("fork server", signal.SIGTERM),
    ("fork server", signal.SIGHUP),
    ("everybody", signal.SIGTERM),
    ("everybody", signal.SIGHUP),
    ("everybody", signal.SIGINT),
]


@dataclass(frozen=True)
class Fault:
    target: str
    number: signal.Signals
    moment: float

    def __str__(self) -> str:
        return f"{self.target}-{self.number.name}-{self.moment:.2f}s"


IN_SUITE = [Fault("launcher", signal.SIGKILL, 0.8), Fault("fork server", signal.SIGKILL, 0.2)]
"""While ranks start, and while the server imports torch."""


def draw(count: int, seed: int) -> list[Fault]:
    """Each kind of fault in turn, at a moment of its own."""
    generator = random.Random(seed)
    kinds = [FAULTS[i % len(FAULTS)] for i in range(count)]
    generator.shuffle(kinds)
    return [Fault(target, number, generator.uniform(0, LONGEST)) for target, number in kinds]


def expected_codes(fault: Fault) -> set[int]:
    """The exit codes that are right, for one that may come when all is done, or before Python has begun."""
    if fault.target == "fork server":
        return {0} if fault.number in (signal.SIGTERM, signal.SIGHUP) else {0, 1}
    return {0, -fault.number} | ({128 + fault.number} if fault.number != signal.SIGKILL else set())


def fork_server_of(launcher: int) -> int | None:
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def inject(fault: Fault, process: subprocess.Popen[str]) -> bool:
    """Send the signal as soon as its moment and its target have come; False if the run was over before."""
    time.sleep(fault.moment)
    while process.poll() is None:
        try:
            if fault.target == "fork server":
                if server := fork_server_of(process.pid):
                    os.kill(server, fault.number)
                    return True
            elif fault.number != signal.SIGINT or catches_signals(process.pid):
                (os.killpg if fault.target == "everybody" else os.kill)(process.pid, fault.number)
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
        time.sleep(0.01)
    return False


def check(fault: Fault, start_cli: Start, folder: Path) -> None:
    folder.mkdir()
    process = start_cli(*RUN, TMPDIR=str(folder))
    hit = inject(fault, process)
    _, err = process.communicate(timeout=ENOUGH)
    assert process.returncode in (expected_codes(fault) if hit else {0}), (fault, err)
    assert session_ends(process.pid), (fault, session_members(process.pid))
    assert len(err.strip().splitlines()) <= 1, (fault, err)
    assert process.returncode in (0, -signal.SIGKILL) or err.strip().startswith("playground: ") or not err, (fault, err)
    assert os.listdir(folder) == [], fault


@pytest.mark.parametrize(
    "fault",
    [*IN_SUITE, *(pytest.param(fault, marks=pytest.mark.stress) for fault in draw(6, seed=5))],
    ids=str,
)
def test_a_signal_at_some_moment(fault: Fault, start_cli: Start, tmp_path: Path) -> None:
    check(fault, start_cli, tmp_path / "temporary")


@pytest.mark.stress
def test_many_signals_at_random_moments(start_cli: Start, tmp_path: Path) -> None:
    for number, fault in enumerate(draw(IN_STRESS, seed=6)):
        check(fault, start_cli, tmp_path / str(number))
