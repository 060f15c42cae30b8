"""Training that is killed ends with the same bits: its ranks between any two calls they make, while
they save and load above all, and its commands from outside."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from processes import ENOUGH, session_ends, session_members
from programs import ForkedProgram

from playground import checkpoint, launch
from playground.checkpoint.folder import SnapshotSettings
from playground.lessons.elastic.experiment import compare
from playground.runtime import restart_count
from playground.runtime.remote import Remote, remote
from playground.training import loop
from playground.training.loop import run_training
from playground.training.settings import TrainingSettings

KILLS = int(os.environ.get("PLAYGROUND_TEST_KILLS", "200"))
"""So many at least, in all."""
AT_ONCE = 25
"""Kills in one training, at most."""
WAYS = {
    "train_by_hand": Remote("general_loop", "train_by_hand"),
    "train_with_ddp": remote(f"{loop.__name__}:train_with_ddp"),
}
SNAPSHOTS = str(Path(checkpoint.__file__).parent)


@dataclass(frozen=True)
class Strike:
    """A rank that is killed at its n-th call or return: of all, or only of those in the code that
    saves and loads."""

    rank: int
    call: int
    in_snapshots: bool


class CallCounter:
    """Counts the calls and returns of all threads, of Python's and of C's functions; kills this
    process at a strike."""

    def __init__(self, strike: Strike | None) -> None:
        self.strike = strike
        self.calls = 0
        self.snapshot_calls = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        in_snapshots = frame.f_code.co_filename.startswith(SNAPSHOTS)
        self.calls += 1
        self.snapshot_calls += in_snapshots
        if self.strike and self.strike.in_snapshots <= in_snapshots:
            count = self.snapshot_calls if self.strike.in_snapshots else self.calls
            if count == self.strike.call:
                os.kill(os.getpid(), signal.SIGKILL)

    def count(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call `fn`, and count."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            fn(*args)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def train_until_struck(
    rank: int, size: int, way: Remote, settings: TrainingSettings, strikes: list[Strike]
) -> tuple[int, int]:
    """Train; the n-th time that the world is started, the n-th strike happens. Returns how many
    calls there were, and how many of them in the code that saves and loads."""
    strike = strikes[restart_count()] if restart_count() < len(strikes) else None
    counter = CallCounter(strike if strike and strike.rank == rank else None)
    counter.count(run_training, rank, size, way, settings)
    return counter.calls, counter.snapshot_calls


class Trial:
    """The same training again and again: first undisturbed, then with strikes."""

    def __init__(
        self, way: Remote, size: int, settings: TrainingSettings, folder: Path, seed: int
    ) -> None:
        self.way = way
        self.size = size
        self.settings = settings
        self.folder = folder
        self.random = random.Random(seed)
        self.counts = self.train("undisturbed", [], [])
        """Of each rank, as `train_until_struck` returns them."""

    def train(self, name: str, strikes: list[Strike], failures: list[str]) -> list[tuple[int, int]]:
        settings = replace(
            self.settings, snapshots=SnapshotSettings(folder=self.folder / name, every=1)
        )
        return launch(
            train_until_struck, self.size, args=(self.way, settings, strikes),
            restarts=len(strikes), fresh=True,
            on_restart=lambda failure, count: failures.append(failure.headline),
        )  # fmt: skip

    def draw(self) -> Strike:
        """Any call from the first one on. Squared: many come early, in quick succession, and
        training gets ahead slowly."""
        rank, in_snapshots = self.random.randrange(self.size), self.random.random() < 0.5
        calls = self.counts[rank][in_snapshots]
        return Strike(rank, 1 + int(self.random.random() ** 2 * calls), in_snapshots)

    def strike(self, kills: int) -> int:
        """Train with so many strikes at most; how many have happened before the end, which must be
        the same."""
        strikes, failures = [self.draw() for _ in range(kills)], list[str]()
        self.train("struck", strikes, failures)
        others = [
            failure
            for failure in failures
            if not re.search("was killed by SIGKILL$|by peer", failure)
        ]
        assert others == []
        assert (
            compare(0, 1, *(self.folder / name for name in ("undisturbed", "struck"))).differing
            == 0
        )
        shutil.rmtree(self.folder / "struck")
        return len(failures)


@pytest.fixture
def settings(digits_folder: Path) -> TrainingSettings:
    """Two epochs of four steps, and a test after each."""
    return TrainingSettings(folder=digits_folder, epochs=2, batch_size=32, limit=128)


@pytest.mark.parametrize(
    ("way", "size", "kills"),
    [
        ("train_by_hand", 2, 3),
        *(
            pytest.param(way, size, KILLS // 4, marks=pytest.mark.stress)
            for way in WAYS
            for size in (2, 3)
        ),
    ],
)
def test_kills_between_any_two_calls_leave_no_trace(
    way: str, size: int, kills: int, settings: TrainingSettings, tmp_path: Path
) -> None:
    trial = Trial(WAYS[way], size, settings, tmp_path, seed=size)
    happened = 0
    while happened < kills:
        happened += trial.strike(min(AT_ONCE, kills - happened))
    assert happened == kills


SNAPSHOT_SCRIPT = Path(__file__).parents[1] / "support/resumable_script.py"
SIGNALS = 20
"""Sent to a command, one after the other."""


@pytest.mark.stress
@pytest.mark.parametrize("size", [2, 3])
def test_a_script_that_is_ended_at_random_moments_ends_with_the_same_bits(
    size: int,
    data_dir: Path,
    tmp_path: Path,
    fork_program: Callable[..., ForkedProgram],
) -> None:
    """From outside: any of its processes is killed, or it is asked to end, by Ctrl-C or SIGTERM;
    then it is started again, if it has ended."""
    words = ("run", "-n", size, "--restarts", SIGNALS, "--grace", 30, SNAPSHOT_SCRIPT, data_dir)
    drawn = random.Random(size)

    def start(name: str) -> ForkedProgram:
        return fork_program("playground", *words, tmp_path / name, 2, 32, 128, 30)

    begun = time.monotonic()
    assert start("undisturbed").communicate(timeout=10 * ENOUGH)[1] == ""
    seconds, codes = time.monotonic() - begun, set()
    for number in drawn.choices(
        [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [2, 1, 1], k=SIGNALS
    ):
        program = start("ended")
        time.sleep(drawn.uniform(0, seconds / 2))
        victims = session_members(program.pid) if number == signal.SIGKILL else [program.pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(drawn.choice([*victims, program.pid])), number)
        program.communicate(timeout=10 * ENOUGH)
        codes.add(program.returncode)
        assert session_ends(program.pid)
    assert start("ended").communicate(timeout=10 * ENOUGH)[1] == ""
    assert codes <= {
        0,
        1,
        -signal.SIGKILL,
        -signal.SIGTERM,
        -signal.SIGINT,
        128 + signal.SIGINT,
        os.EX_TEMPFAIL,
    }, codes
    assert compare(0, 1, tmp_path / "undisturbed", tmp_path / "ended").differing == 0
