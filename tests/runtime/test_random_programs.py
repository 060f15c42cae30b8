"""Random programs on ranks of gloo: right ones are never called a deadlock, and wrong ones are
diagnosed."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_programs import (
    MISTAKES,
    Mistake,
    Program,
    Step,
    list_groups,
    make_mistake,
    receive,
    send,
    write_programs,
)

from playground import Deadlock, RankFailed, RankTimeout, launch
from playground.runtime.flight_recorder import NEW_GROUP, SEND
from playground.runtime.rank.reports import Event, report

TIMEOUT = 15.0
"""Seconds, far above what a proof takes: a run that stands still and ends by it has not been
proved."""
TAGS, IN_THREAD = 20, 19
"""Tags per program; the one of messages that a thread sends."""
LONG = 0.3
"""Seconds that a rank sleeps or is stopped at most: some looks of the launcher's."""


def play(rank: int, size: int, rounds: list[list[Program]], seed: int, disturbed: bool) -> int:
    """Run one program after the other; return how many operations were called. Ranks that are
    `disturbed` sleep now and then and run some programs in a thread, and one of them is stopped for
    a while."""
    rng = random.Random(seed * size + rank)
    player, children = Player(size, rng, disturbed), list[subprocess.Popen[bytes]]()
    if disturbed and seed % size == rank:
        stop = (
            f"sleep {rng.uniform(0, 1)}; kill -STOP {os.getpid()}; sleep {LONG}; kill -CONT "
            f"{os.getpid()}"
        )
        children.append(subprocess.Popen(["sh", "-c", stop]))
    for number, programs in enumerate(rounds):
        if disturbed and rng.random() < 0.1:
            thread = threading.Thread(target=player.run, args=(number, programs[rank]))
            thread.start()
            thread.join()
        else:
            player.run(number, programs[rank])
    for child in children:
        child.wait()
    return player.called


class Player:
    """Runs programs on this rank of a world."""

    def __init__(self, size: int, rng: random.Random, disturbed: bool) -> None:
        self.groups = {ranks: dist.new_group(list(ranks)) for ranks in list_groups(size)[1:]}
        self.rng = rng
        self.disturbed = disturbed
        self.called = 0

    def run(self, number: int, program: Program) -> None:
        works, threads = dict[str, Any](), list[threading.Thread]()
        for step in program:
            if self.disturbed and self.rng.random() < 0.05:
                time.sleep(self.rng.choice((0.001, 0.01, 0.01, 0.1, LONG)))
            elif not self.disturbed:
                report(number=number)
            if step.call and step.call.tag == IN_THREAD and step.call.kind == SEND:
                threads.append(threading.Timer(self.rng.uniform(0, 0.1), self.call, (step, number)))
                threads[-1].start()
            elif step.call:
                works[step.call.line] = self.call(step, number)
            if isinstance(work := works.get(step.awaits), dist.Work):
                work.wait()
        for thread in threads:
            thread.join()

    def call(self, step: Step, number: int) -> Any:
        """Call its operation; return the work if it is asynchronous."""
        assert step.call
        self.called += 1
        call, returns = step.call, step.awaits != step.call.line
        group, tag = self.groups.get(call.group), call.tag + TAGS * number
        count, dtype = call.shape[0] if call.shape else 1, getattr(torch, call.dtype or "float32")
        scale = 20_000 if number % 4 == 3 else 1  # some do not fit into the buffers of sockets
        tensor, *parts = torch.zeros(1 + len(call.group), count * scale, dtype=dtype)
        root_parts = parts if call.peer == dist.get_rank() else None
        more: dict[str, Any] = {"group": group, "async_op": returns}
        match call.name:
            case "send":
                return (dist.isend if returns else dist.send)(tensor, call.peer, group, tag)
            case "recv":
                return (dist.irecv if returns else dist.recv)(tensor, call.peer, group, tag)
            case "all_reduce":
                return dist.all_reduce(tensor, **more)
            case "broadcast":
                return dist.broadcast(tensor, call.peer, **more)
            case "reduce":
                return dist.reduce(tensor, call.peer, **more)
            case "all_gather_into_tensor":
                return dist.all_gather_into_tensor(torch.cat(parts), tensor, **more)
            case "scatter":
                return dist.scatter(tensor, root_parts, call.peer, **more)
            case "gather":
                return dist.gather(tensor, root_parts, call.peer, **more)
            case "all_to_all":
                return dist.all_to_all([torch.zeros_like(part) for part in parts], parts, **more)
            case "barrier":
                return dist.barrier(**more)
        assert call.name == NEW_GROUP
        return dist.new_group() and None


def write_rounds(size: int, count: int, rng: random.Random) -> list[list[Program]]:
    """Right programs, in each of which a thread sends a message that the main thread of another
    rank waits for."""
    rounds = [write_programs(size, rng) for _ in range(count)]
    for programs in rounds:
        sender, receiver = rng.sample(range(size), 2)
        for rank, place, operation in (
            (sender, 0, send(receiver, size)),
            (receiver, rng.randint(0, len(programs[receiver])), receive(sender, size)),
        ):
            operation = replace(operation, tag=IN_THREAD, line="in a thread")
            programs[rank].insert(place, Step(operation, operation.line))
    return rounds


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
