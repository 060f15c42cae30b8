"""breakpoint() in a rank: the debugger talks to the terminal itself, one rank at a time."""

from __future__ import annotations

import contextlib
import fcntl
import pdb
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

TERMINAL = "/dev/tty"


class RankDebugger(pdb.Pdb):
    """Python's debugger at a terminal that several ranks share: whoever holds its lock is the one that speaks."""

    def __init__(self, rank: int, tell: Callable[..., None]) -> None:
        terminal = open(TERMINAL), open(TERMINAL, "w")  # noqa: SIM115 - they stay open as long as this process debugs
        super().__init__(stdin=terminal[0], stdout=terminal[1], nosigint=True)
        self.prompt = f"(rank {rank} Pdb) "
        self.tell = tell

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        with self.turn():
            super().interaction(*args, **kwargs)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the terminal; meanwhile, and as long as a person thinks, this rank's silence is no hang."""
        self.tell("paused", True)
        fcntl.flock(self.stdin, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.stdin, fcntl.LOCK_UN)
            self.tell("paused", False)


debuggers: list[RankDebugger] = []
"""This process's, once it has met a breakpoint."""


def set_trace(frame: FrameType, rank: int, tell: Callable[..., None]) -> None:
    """Let a person debug this process from `frame` on; `tell("paused", flag)` says when it waits for them.

    Peers that wait for this rank inside an operation of the process group do so for its timeout, no longer.
    Raises `RuntimeError` if this process has no terminal.
    """
    try:
        debuggers[:] = debuggers or [RankDebugger(rank, tell)]
    except OSError:
        raise RuntimeError(
            "breakpoint() in a rank needs a terminal, and there is none: run the program in one, "
            "or set PYTHONBREAKPOINT=0 to pass over breakpoints"
        ) from None
    debuggers[0].set_trace(frame)
