"""The output of ranks, byte for byte: each has a pipe for stdout and one for stderr, or one for
both where both end up in the same file, and the launcher reads them.

Nothing is buffered in a rank, whose streams are those of `python -u`. The launcher passes lines on
when they are whole, so that lines of several ranks do not mix. What overwrites its line ("\\r"), as
bars do, is passed on at once; the beginning of a line, such as a prompt, when its rank is quiet.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from select import PIPE_BUF
from typing import Any, Protocol

from playground.base.files import writing
from playground.base.forks import close_in_children

EVERY_RANK, FIRST_RANK = "ranks", "first"
READ_AT_ONCE = 2**16
LONGEST_LINE = 2**20
"""Bytes of a line that are kept until its end arrives. A longer line is passed on in pieces, and
what other ranks print on the same stream is not read meanwhile."""
QUIET = 0.05
"""Seconds without output after which a rank that sleeps is taken to have printed what it wanted to,
a prompt for example. (One that runs may be between the two writes of a `print`.)"""
PATIENCE = 1.0
"""Seconds after which the beginning of a line is passed on, whatever its rank does."""
FLOOD, FLOOD_GAP, REST = 32, 0.005, 0.002
"""A pipe that has been read so often, each time within `FLOOD_GAP` seconds, is left alone for
`REST` seconds after each time: one that wakes its reader with each line slows its rank down."""
BEGINNING = re.compile(rb"(?<=[\n\r])(?=[^\n\r])")
_last: dict[str, Output] = {}
"""By stream, the output of a rank that was passed on last."""


class Output:
    """The launcher's end of one of these pipes."""

    def __init__(
        self, rank: int, stream: str, pipe: Connection, shown: str | Path = EVERY_RANK
    ) -> None:
        """`stream`: the name in `sys` of the launcher's own stream to which it goes, "stdout" or
        "stderr". `shown`: see `LaunchConfig.output`."""
        self.rank = rank
        self.label = label_of(rank)
        self.is_labelled = False
        """Whether its lines have the label also where no person reads them."""
        self.stream = stream
        self.pipe = pipe
        self.is_shown = shown == EVERY_RANK or (shown == FIRST_RANK and rank == 0)
        self.file = shown / file_name(rank, stream) if isinstance(shown, Path) else None
        self.unfinished = bytearray()
        """The beginning of a line whose end has not arrived yet."""
        self.is_long = False
        """Whether it is in a line that was too long to be kept, and whose end has not arrived."""
        self.look_at = math.inf
        """When to look whether the rank is quiet."""
        self.expires = math.inf
        """When the end of its line is not waited for any longer."""
        self.reads = 0
        """How often it was read without a pause."""
        self.read_at = -math.inf
        """When it was read last."""
        self.rests_until = -math.inf
        """When it is to be read again."""
        self.end = b"\n"
        """The last byte that was passed on."""
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def seconds_left(self, now: float) -> float:
        """Until something is to be done about this output, though nothing arrives: `relay_part`, or
        to read again what rests; infinite where there is nothing to do."""
        left = max(0.0, min(self.look_at, self.expires) - now)
        return min(left, self.rests_until - now) if self.rests_until > now else left

    @property
    def holder(self) -> Output | None:
        """The output that is in a long line on the same stream: nothing else is read until its
        end."""
        last = _last.get(self.stream, self)
        return last if last is not self and last.is_long else None

    def is_read(self, now: float) -> bool:
        """Whether what arrives is to be taken in now."""
        return not (self.pipe.closed or self.holder or self.rests_until > now)

    def relay(self) -> None:
        """Take in what has arrived, and pass it on as far as its last line is whole, overwrites
        itself or is too long."""
        arrived = os.read(self.pipe.fileno(), READ_AT_ONCE)
        if not arrived:  # the rank has ended
            self.pipe.close()
            self.pass_on()
            return
        lines, newline, line = arrived.rpartition(b"\n")
        if newline:
            self.unfinished += lines + newline
            self.pass_on()
        now = time.monotonic()
        self.reads = self.reads + 1 if now - self.read_at < FLOOD_GAP else 0
        self.read_at = now
        if self.reads >= FLOOD:
            self.rests_until = now + REST
        # of a long write, which comes in pieces, there may be more
        if not self.unfinished or self.is_long or len(arrived) > PIPE_BUF:
            self.expires = now + PATIENCE
        self.look_at = now + QUIET
        self.unfinished += line
        if b"\r" in line or not (self.unfinished or self.is_long):
            self.pass_on()
        elif len(self.unfinished) > LONGEST_LINE:
            self.pass_on(to_be_continued=True)

    def relay_part(self, is_quiet: Callable[[], bool]) -> None:
        """Pass on the beginning of a line, if it has waited long enough for its end. `is_quiet`:
        whether its rank sleeps."""
        now = time.monotonic()
        if now < min(self.look_at, self.expires):
            return
        if self.holder:
            self.look_at = now + QUIET
            self.expires = now + PATIENCE
        elif now >= self.expires or (is_quiet() and not wait([self.pipe], 0)):
            self.pass_on()
        else:
            self.look_at = now + QUIET

    def relay_all(self) -> None:
        """Pass on all that has arrived by now."""
        if holder := self.holder:
            holder.relay_all()
        if not self.pipe.closed and wait([self.pipe], 0):
            self.relay()  # once: a rank that prints endlessly never lets the pipe run dry
        self.pass_on()

    def pass_on(self, to_be_continued: bool = False) -> None:
        """Pass on what has been taken in. `to_be_continued`: it is a piece of a line that nothing
        else is to come into."""
        if ready := bytes(self.unfinished):
            self.unfinished.clear()
            self.write(ready)
        self.is_long = to_be_continued
        if not to_be_continued:
            self.look_at = self.expires = math.inf

    def write(self, data: bytes) -> None:
        """Write this after what it wrote last, or, if another rank has left a line there, below
        that. Where a person reads them, each line begins with the rank that it comes from."""
        if self.file:
            with writing(self.file, append=True) as file:
                file.write(data)
        stream, before = getattr(sys, self.stream), _last.get(self.stream, self)
        if stream is None or not self.is_shown:  # there is no console at all
            return
        if before is not self and before.end not in b"\r\n":
            before.write(b"\n")
        _last[self.stream] = self
        shown = data
        is_terminal = is_a_terminal(stream)
        if self.is_labelled or is_terminal:
            # dimmed unless the terminal or the user does not want that: no-color.org
            label = self.label
            if is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
                label = f"\033[2m{label}\033[0m"
            shown = BEGINNING.sub(label.encode(), self.end + data)[1:]
        self.end = data[-1:]
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()  # what was printed here before
            stream.buffer.write(shown)
        else:  # a notebook's, say, or one of the user's own that can only be written to
            stream.write(self.decode(shown))
        if flush := getattr(stream, "flush", None):
            flush()


class HoldingWorld(Protocol):
    """All outputs of one kind of a world, which pass on together what they hold back."""

    outputs: dict[int, Any]
    """By rank."""

    @property
    def seconds_left(self) -> float:
        """Until something has waited long enough; infinite where nothing waits."""

    def pass_on(self) -> None: ...


class HeldOutput(Output):
    """An output of which a part waits for those of the other ranks."""

    world: HoldingWorld

    def __init__(self, output: Output, world: HoldingWorld) -> None:
        super().__init__(output.rank, output.stream, output.pipe)
        self.world = world
        world.outputs[self.rank] = self

    def seconds_left(self, now: float) -> float:
        return min(super().seconds_left(now), self.world.seconds_left)

    def relay_part(self, is_quiet: Callable[[], bool]) -> None:
        super().relay_part(is_quiet)
        if self.rank == 0:  # once for all
            self.world.pass_on()


def end_lines() -> None:
    """What ranks have printed is complete. Where a person reads it, what is printed next begins a
    new line."""
    for stream in ("stdout", "stderr"):
        last, ours = _last.pop(stream, None), getattr(sys, stream)
        if last and ours and last.end not in b"\r\n" and is_a_terminal(ours):
            ours.write("\n")


def is_a_terminal(stream: Any) -> bool:
    """Whether a person reads this. `print` does not ask: a stream need not be able to tell."""
    return bool(getattr(stream, "isatty", bool)())


def share_a_file() -> bool:
    """Whether stdout and stderr of this process are the same file, pipe or terminal, as after
    `2>&1`."""
    streams = sys.stdout, sys.stderr
    if not all(isinstance(stream, io.TextIOWrapper) for stream in streams):
        return False
    try:
        return os.path.sameopenfile(*(stream.fileno() for stream in streams))
    except (OSError, ValueError):  # closed, or in memory
        return False


def label_of(rank: int) -> str:
    """What each of its lines begins with where a person reads them."""
    return f"[rank {rank}] "


def file_name(rank: int, stream: str) -> str:
    """The file that a stream of a rank goes to, in a folder for the output of all."""
    return f"rank{rank}.{stream}"


def open_pipes(
    rank: int, shown: str | Path = EVERY_RANK, are_one: bool = False
) -> tuple[list[Output], list[Connection]]:
    """For a rank about to be started: the launcher's ends of its pipes, and the rank's ends, of its
    stdout and its stderr. `shown`: see `LaunchConfig.output`. `are_one`: whether both have the same
    pipe, which keeps the order of what the rank prints."""
    outputs, ends = [], []
    for stream in ("stdout",) if are_one else ("stdout", "stderr"):
        ours, theirs = Pipe(duplex=False)
        outputs.append(Output(rank, stream, ours, shown))
        close_in_children(ours)
        ends.append(theirs)
    return outputs, [ends[0], ends[-1]]
