"""In a rank: breakpoints and questions, which a person answers at the launcher, one rank at a time.

Sources: https://docs.python.org/3/library/pdb.html and https://docs.python.org/3/library/bdb.html.
"""

from __future__ import annotations

import bdb
import builtins
import linecache
import os
import pdb
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from playground.base.frames import is_program
from playground.base.upstream import DEFAULT_TIMEOUTS
from playground.world.rank.assignment import Breakpoints
from playground.world.rank.reports import BREAKPOINT, report

LONG = timedelta(days=11)
"""The timeout of process groups while a rank is debugged: a million seconds, which all backends
can count in milliseconds."""
SKIPPED = [f"playground.{room}.*" for room in ("base", "explain", "play", "tap", "world")]
"""Modules of ours that stepping into a call passes by."""
python_set_trace, python_input = pdb.set_trace, builtins.input


class Debugger(pdb.Pdb):
    """The debugger of `breakpoint()`: it finds the lines of cells, steps over our own, and leaves
    out of the stack what has started the program."""

    def __init__(self) -> None:
        super().__init__(nosigint=True, skip=SKIPPED)

    def canonic(self, filename: str) -> str:
        return filename if filename in linecache.cache else super().canonic(filename)

    def get_stack(self, f: Any, t: Any) -> tuple[list[tuple[Any, int]], int]:
        stack, at = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack[: at + 1]]
        first = next((place for place, file in enumerate(files) if is_program(file)), 0)
        return stack[first:], at - first


@dataclass(frozen=True, slots=True)
class Stop:
    """What `pdb.set_trace` is in rank `rank`, which `breakpoint()` calls, too."""

    rank: int
    breakpoints: Breakpoints

    def __call__(self, **options: object) -> None:
        """Open the debugger at the caller's line, if this rank's breakpoints open. Raises
        `BdbQuit`, with what to do, where nobody answers."""
        caller = sys._getframe(1)
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        if self.breakpoints.advice:
            advice = self.breakpoints.advice.format(rank=self.rank)
            raise bdb.BdbQuit(f"rank {self.rank} is at a breakpoint ({place}): {advice}")
        if self.rank in self.breakpoints.ranks:
            report(**{BREAKPOINT: place})
            Debugger().set_trace(caller)


def prepare_breakpoints(
    rank: int, breakpoints: Breakpoints | None, ask: Callable[..., str]
) -> None:
    """From now on, breakpoints of this rank do what is asked for, and questions are asked by `ask`
    where they are answered. None: both are Python's own."""
    pdb.set_trace = python_set_trace
    builtins.input = python_input
    if breakpoints:
        pdb.set_trace = Stop(rank, breakpoints)
        if not breakpoints.advice:
            builtins.input = ask
        if breakpoints.lifts_timeouts:
            from playground.tap.replacement import Replacement  # torch has been imported by now

            c10d = sys.modules["torch.distributed.distributed_c10d"]
            for name in DEFAULT_TIMEOUTS:
                Replacement(c10d, name, lambda _: LONG).install()


def end_tracing() -> None:
    """If a debugger steps through this thread, have it stop."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)
