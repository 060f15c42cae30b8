"""In a rank: a solution runs within limits. What it raises ends the check, and so does a limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from playground.base.errors import LOST_PEER
from playground.exercises.attempt import BREAKPOINT, DEADLINE, ENDLESS
from playground.exercises.exercise import ERROR, FAIL
from playground.exercises.file_checks import NOT_WRITTEN
from playground.exercises.transcript import TICK, Transcript, end_check, stop
from playground.world.rank.reports import QUIT, is_reporting, report

MAX_PRINTED = 2**16
"""Bytes printed in one case."""
ASLEEP = 20.0
"""Seconds for which a solution may do nothing, outside all operations."""
BUSY = 0.01
"""The share of a tick that a process computes at least if it is not asleep: a busy machine may not
give it more."""
LOGGED = re.compile(r"\[rank\d+\]:\[\w+ [\d:.]+ [\w.]+:\d+\] ?")
"""The time and place before a line that torch's C++ logs."""
IMPORTING = 20
"""How many times the deadline an import may take."""


class Limits:
    """What a solution has used: seconds that this process has computed, not those for which it has
    waited, for other ranks or for a busy machine; and seconds that it has slept."""

    def __init__(self, record: Transcript) -> None:
        self.record = record
        self.clock = time.process_time()
        self.computed = 0.0
        self.asleep = 0.0

    def look(self, number: int, frame: FrameType | None) -> None:
        """The handler of the timer, once each `TICK`. Ends the check if a limit is passed."""
        if is_reporting():  # the next look counts what this one does not
            return
        before, self.clock = self.clock, time.process_time()
        computed = self.clock - before
        is_asleep = computed <= BUSY * TICK
        self.asleep = self.asleep + TICK if is_asleep else 0.0
        if not is_asleep:
            report()  # a sign of life
        if self.record.is_debugged:
            return
        self.computed += computed / (IMPORTING if is_importing(frame) else 1)
        if words := self.find_passed():
            stop(f"{ENDLESS}: {words}", self.record.line(frame), self.record.read_written())

    def find_passed(self) -> str:
        """The first limit that is passed, in words; empty for none."""
        if os.fstat(self.record.printed).st_size > MAX_PRINTED:
            return f"it prints more than {MAX_PRINTED:,} characters"
        if self.computed > DEADLINE:
            return f"no result after {DEADLINE:g} s of computing"
        return f"it has slept for {ASLEEP:g} s" if self.asleep > ASLEEP else ""


def is_importing(frame: FrameType | None) -> bool:
    files = (each.f_code.co_filename for each, _ in traceback.walk_stack(frame))
    return any(file.startswith("<frozen importlib") for file in files)


@contextlib.contextmanager
def solving(record: Transcript) -> Iterator[None]:
    """The solution runs, within limits. That another rank has hung up is raised: the launcher sees
    how that one ended. Whatever else the solution raises ends the check."""
    handler = signal.signal(signal.SIGALRM, Limits(record).look)
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    record.running = True
    try:
        yield
    except BaseException as error:
        record.running = False
        if isinstance(error, RuntimeError) and LOST_PEER.search(str(error)):
            raise
        end_by_error(record, error)
    finally:
        record.running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def leave_out(printed: str, words: str) -> str:
    """What is printed, without the lines that the words of an error have, too."""
    lines = LOGGED.sub("", printed).splitlines()
    return "\n".join(line for line in lines if line.strip() not in words)


def end_by_error(record: Transcript, error: BaseException) -> NoReturn:
    """End the check with what the solution has raised, and the last of its lines that it was on."""
    stack = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno or 0 for frame in stack if frame.filename == record.file]
    status = ERROR
    if isinstance(error, NotImplementedError):
        status, words = FAIL, NOT_WRITTEN
    elif isinstance(error, BdbQuit):
        words = QUIT if record.is_debugged else BREAKPOINT
    else:
        first = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        words = re.sub(r" at 0x\w+", "", LOGGED.sub("", first))  # which differs from run to run
    line, printed = (lines or [0])[-1], leave_out(record.read_printed(), words)
    end_check(status=status, words=words, line=line, printed=printed)
