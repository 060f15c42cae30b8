"""Random programs on ranks of gloo: right ones are never called a deadlock, and wrong ones are
diagnosed."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from drawn_player import Player, stop_for_a_while, write_rounds
from fixtures import Run
from processes import free_port
from random_programs import MISTAKES, Mistake, Program, make_mistake

from playground import Deadlock, RankFailed, RankTimeout, launch
from playground.world.rank.reports import Event

TIMEOUT = 15.0
"""Seconds, far above what a proof takes: a run that stands still and ends by it has not been
proved."""
SCRIPT = Path(__file__).parent.with_name("support") / "drawn_script.py"


def play(rank: int, size: int, rounds: list[list[Program]], seed: int, disturbed: bool) -> int:
    """Run one program after the other; return how many operations were called. Ranks that are
    `disturbed` sleep now and then and run some programs in a thread, and one of them is stopped for
    a while."""
    rng = random.Random(seed * size + rank)
    player = Player(size, rng, disturbed)
    child = stop_for_a_while(rng) if disturbed and seed % size == rank else None
    for number, programs in enumerate(rounds):
        if disturbed and rng.random() < 0.1:
            thread = threading.Thread(target=player.run, args=(number, programs[rank]))
            thread.start()
            thread.join()
        else:
            player.run(number, programs[rank])
    if child:
        child.wait()
    return player.called


@pytest.fixture
def busy(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many processes that compute, beside the test."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(request.param)
    ]
    yield
    for other in others:
        other.kill()
        other.wait()


def run_right_programs(size: int, launches: int, rng: random.Random) -> int:
    """Run so many launches of eight programs each; return the number of operations."""
    return sum(
        sum(
            launch(
                play,
                size,
                args=(write_rounds(size, 8, rng), rng.randrange(10**6), True),
                timeout=TIMEOUT,
            )
        )
        for _ in range(launches)
    )


def test_right_programs_are_never_called_a_deadlock(caplog: pytest.LogCaptureFixture) -> None:
    assert run_right_programs(3, 1, random.Random(0)) > 50
    assert caplog.records == []


def check_scripts(run_cli: Run, folder: Path, seeds: range, rounds: int) -> None:
    """Run drawn scripts on two to four ranks each: all end, and nothing is told of any."""
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        words = ["run", "-n", f"{2 + seed % 3}", str(SCRIPT), f"{seed}", f"{rounds}"]
        ran = run_cli(*words, free_port(), str(place))
        assert (ran.code, ran.err) == (0, ""), (seed, ran)
        assert " calls: " in ran.out


def test_right_scripts_run_and_nothing_is_told_of_them(run_cli: Run, tmp_path: Path) -> None:
    check_scripts(run_cli, tmp_path, range(3), 6)


@pytest.mark.stress
@pytest.mark.parametrize("busy", [0, 2], indirect=True)
def test_many_right_scripts_run_and_nothing_is_told_of_them(
    run_cli: Run, tmp_path: Path, busy: None
) -> None:
    check_scripts(run_cli, tmp_path, range(3, 63), 40)


@pytest.mark.stress
@pytest.mark.parametrize("busy", [0, 2], indirect=True)
def test_many_right_programs_are_never_called_a_deadlock(
    caplog: pytest.LogCaptureFixture, busy: None
) -> None:
    rng = random.Random(1)
    assert sum(run_right_programs(size, 5, rng) for size in (2, 3, 4)) > 1000
    assert caplog.records == []


def run_wrong_program(
    mistake: Mistake, size: int, rng: random.Random
) -> tuple[RankTimeout | RankFailed | None, float]:
    """Run the programs after some right ones. Returns how this failed, and how many seconds after a
    rank's last step; None if gloo took no notice."""
    last_step = 0.0

    def note_step(rank: int, event: Event) -> None:
        nonlocal last_step
        last_step = time.monotonic()

    rounds = [*write_rounds(size, rng.randint(2, 3), rng), mistake.programs]
    try:
        launch(play, size, args=(rounds, 0, False), timeout=TIMEOUT, on_report=note_step)
    except (RankTimeout, RankFailed) as error:
        return error, time.monotonic() - last_step
    return None, 0.0


def run_wrong_programs(
    hows: Sequence[str], size: int, rng: random.Random
) -> tuple[Counter[str], list[float]]:
    """Run programs with each of these mistakes. Count how they end and what is told of it; return
    this, and the seconds that each `Deadlock` took to be proved."""
    count, times = Counter[str](), list[float]()
    for how in hows:
        while (mistake := make_mistake(how, size, rng)) is None:
            pass
        error, seconds = run_wrong_program(mistake, size, rng)
        if error is None:
            count["unnoticed"] += 1
            continue
        kind, culprits = (
            (error.diagnosis.kind, error.diagnosis.culprits) if error.diagnosis else ("", ())
        )
        stands, deadlock = isinstance(error, RankTimeout), isinstance(error, Deadlock)
        right = {"kind": kind in mistake.list_right_kinds(), "culprit": mistake.rank in culprits}
        count.update(wrong=1, stands=stands, deadlock=deadlock, **right)
        times += [seconds] * deadlock
        if not all(right.values()) or stands > deadlock:
            print(f"{mistake}\n{error}\n{error.diagnosis}\n")
    return count, times


@pytest.mark.stress
def test_wrong_programs_are_diagnosed() -> None:
    count, _ = run_wrong_programs(("shape", "order"), 3, random.Random(0))
    assert count == {"wrong": 2, "stands": 1, "deadlock": 1, "kind": 2, "culprit": 2}


@pytest.mark.stress
@pytest.mark.parametrize("busy", [0, 2], indirect=True)
def test_many_wrong_programs_are_diagnosed(busy: None) -> None:
    """At least 98 % of those that stand still are proved to be deadlocks, and of these and those
    that gloo aborts, at least 98 % get a kind that is right, and the culprit is named."""
    rng, count, times = random.Random(2), Counter[str](), list[float]()
    for size in (2, 3, 4):
        # need a third rank
        hows = [how for how in MISTAKES if size > 2 or how not in ("group", "peer")]
        counted, took = run_wrong_programs(hows * 2, size, rng)
        count += counted
        times += took
    print(dict(count), f"seconds: median {statistics.median(times):.2f}, maximum {max(times):.2f}")
    assert count["wrong"] >= 40
    assert count["deadlock"] >= 0.98 * count["stands"]
    assert count["kind"] >= 0.98 * count["wrong"]
    assert count["culprit"] >= 0.98 * count["wrong"]
