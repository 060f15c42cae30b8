"""Exceptions at any point inside an all-reduce in memory that ranks share: later sums are right, or
an error on every rank."""

from __future__ import annotations

import inspect
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from playground.algorithms import load_all_reduce, segment, shared_memory
from playground.testing import World

FILES = {module.__file__ for module in (shared_memory, segment)}
CALL = segment.Segment.run.__code__
LINES, FIRST = inspect.getsourcelines(segment.Segment.run)
BEGUN = FIRST + [line.strip() for line in LINES].index("try:")
"""From this line of the file on, a call has begun: what is raised there, the other ranks must hear
of."""
CALLS = 5


class Alarm(Exception):
    """Raised by the handler of a signal."""


def is_inside(frame: FrameType | None) -> bool:
    """Whether this frame is inside a call that has begun: `Segment.run`, behind the line of its
    `try`."""
    while frame and frame.f_code is not CALL:
        frame = frame.f_back
    return frame is not None and frame.f_lineno > BEGUN


@contextmanager
def raised_at_line(error: type[BaseException], number: int) -> Iterator[None]:
    """Raise `error` before the line that is run as the `number`-th inside a call."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and left and is_inside(frame):
            left -= 1
            if not left:
                raise error
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def raised_after(error: type[BaseException], seconds: float) -> Iterator[None]:
    """Have the handler of a signal raise `error` inside the first call that goes on then."""

    def handle(_: int, frame: FrameType | None) -> None:
        if is_inside(frame):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise error
        signal.setitimer(signal.ITIMER_REAL, 20e-6)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_call(group: Any, rank: int, size: int, number: int, elements: int) -> str:
    """One call, and what has come of it: whether its result is right, or its error."""
    tensor = torch.full((elements * size,), rank + 10.0**number, dtype=torch.float64)
    try:
        load_all_reduce("shared-memory")(tensor, group=group)
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "right" if (tensor == sum(range(size)) + size * 10.0**number).all() else "wrong"


def inject(rank: int, size: int, seed: int, count: int) -> list[list[str]]:
    """For each of `count` exceptions, in a group of its own, what has come of each call on this
    rank."""
    draw, outcomes = random.Random(seed), []
    for _ in range(count):
        culprit, error = draw.randrange(size), draw.choice([KeyboardInterrupt, MemoryError, Alarm])
        elements = draw.choice([3, 1000, 40_000, 150_000])
        line = draw.randrange(1, 160)
        seconds = draw.uniform(50e-6, 2e-3)
        by_signal = draw.random() < 0.4
        group = dist.new_group(range(size), timeout=timedelta(seconds=20))
        make_call(group, rank, size, 0, 1)  # the first call makes the memory
        raised = raised_after(error, seconds) if by_signal else raised_at_line(error, line)
        told = []
        if rank == culprit:
            with raised:
                told = [make_call(group, rank, size, each, elements) for each in range(CALLS)]
        else:
            told = [make_call(group, rank, size, each, elements) for each in range(CALLS)]
        outcomes.append(told)
        dist.destroy_process_group(group)
        dist.barrier()
    return outcomes


def judge(by_rank: tuple[list[str], ...]) -> str:
    """What one exception has led to."""
    if any("wrong" in told for told in by_rank):
        return "wrong"
    if any("Timed out" in each for told in by_rank for each in told):
        return "hung"
    broken = [
        next((at for at, each in enumerate(told) if each != "right"), CALLS) for told in by_rank
    ]
    if any(
        each == "right"
        for told, first in zip(by_rank, broken, strict=True)
        for each in told[first:]
    ):
        return "right after an error"
    if min(broken) == CALLS:
        return "right"
    return "an error on every rank" if max(broken) <= min(broken) + 1 else "told too late"


@pytest.mark.parametrize(
    ("size", "count"),
    [(2, 12), *[pytest.param(size, 700, marks=pytest.mark.stress) for size in (2, 3, 4)]],
)
def test_an_exception_inside_a_call_never_makes_a_sum_wrong(
    size: int, count: int, world: Callable[..., World]
) -> None:
    """An alarm's handler, KeyboardInterrupt and MemoryError, at any line of it; those who wait are
    woken."""
    results = world(size, timeout=600).run(inject, 2026 + size, count)
    found = Counter(judge(by_rank) for by_rank in zip(*results, strict=True))
    print(f"{size} ranks: {dict(found)}")
    assert found.keys() <= {"right", "an error on every rank"}, found
    assert found["an error on every rank"] > count / 3
