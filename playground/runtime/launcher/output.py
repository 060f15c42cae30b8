"""The output of ranks, byte for byte: each has a pipe for stdout and one for stderr, and the
launcher reads them.

Lines are passed on when they are whole, so that those of several ranks do not mix; what overwrites
its line ("\\r"), as bars do, at once. Left to themselves ranks would write to one file at a time of
their choice: on a terminal in the middle of each other's lines, into a pipe when a buffer is full,
and never if they are killed before.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import re
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from playground.runtime.forks import close_in_children

EVERY_RANK, FIRST_RANK = "ranks", "first"
READ_AT_ONCE = 2**16
LONGEST_LINE = 2**20
"""Bytes of a line that are kept until its end arrives."""
BEGINNING = re.compile(rb"(?<=[\n\r])(?=[^\n\r])")
_last: dict[str, Output] = {}
"""By stream, the output of a rank that was passed on last."""


def print_lines() -> None:
    """In a rank: from now on, whatever this process prints goes into its pipes a line at a time."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()  # what its import of the program has printed
        stream = open_lines(number, getattr(sys, name).encoding)
        # or what is printed to the second would have a buffer of its own
        for each in (name, f"__{name}__"):
            setattr(sys, each, stream)


def open_lines(number: int, encoding: str) -> io.TextIOWrapper:
    """A text stream to this file descriptor that hands over each line as soon as it is complete."""
    return open(
        number, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False
    )


class Output:
    """The launcher's end of one of these pipes."""

    def __init__(
        self, rank: int, stream: str, pipe: Connection, shown: str | Path = EVERY_RANK
    ) -> None:
        """`stream`: the name in `sys` of the launcher's own stream to which it goes, "stdout" or
        "stderr". `shown`: see `LaunchConfig.output`."""
        self.rank = rank
        self.label = f"[rank {rank}] "
        self.is_labelled = False
        """Whether its lines have the label also where no person reads them."""
        self.stream = stream
        self.pipe = pipe
        self.is_shown = shown == EVERY_RANK or (shown == FIRST_RANK and rank == 0)
        self.file = shown / file_name(rank, stream) if isinstance(shown, Path) else None
        self.unfinished = b""
        """The beginning of a line whose end has not arrived yet."""
        self.end = b"\n"
        """The last byte that was passed on."""
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def seconds_left(self, now: float) -> float:
        """Until `relay_part` is to be called, though nothing arrives."""
        return math.inf

    def relay_part(self, is_quiet: Callable[[], bool]) -> None:
        """Pass on what has waited long enough."""

    def relay(self) -> None:
        """Pass on what has arrived, as far as its last line is whole, overwrites itself or is too
        long."""
        arrived = os.read(self.pipe.fileno(), READ_AT_ONCE)
        if not arrived:  # the rank has ended
            self.pipe.close()
            return
        lines, newline, line = arrived.rpartition(b"\n")
        whole, self.unfinished = (
            (self.unfinished + lines + newline, line) if newline else (b"", self.unfinished + line)
        )
        if b"\r" in line or len(self.unfinished) > LONGEST_LINE:
            whole, self.unfinished = whole + self.unfinished, b""
        if whole:
            self.write(whole)

    def relay_all(self) -> None:
        """Pass on all that has arrived by now."""
        if not self.pipe.closed and wait([self.pipe], 0):
            self.relay()  # once: a rank that prints endlessly never lets the pipe run dry
        if self.unfinished:
            rest, self.unfinished = self.unfinished, b""
            self.write(rest)

    def write(self, data: bytes) -> None:
        """Write this after what it wrote last, or, if another rank has left a line there, below
        that. Where a person reads them, each line begins with the rank that it comes from."""
        if self.file:
            with self.file.open("ab") as file:
                file.write(data)
        stream, before = getattr(sys, self.stream), _last.get(self.stream, self)
        if stream is None or not self.is_shown:  # there is no console at all
            return
        if before is not self and before.end not in b"\r\n":
            before.write(b"\n")
        shown, _last[self.stream] = data, self
        is_terminal = stream.isatty()
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
        else:  # a notebook's, say
            stream.write(self.decode(shown))
        stream.flush()


def end_lines() -> None:
    """What ranks have printed is complete. Where a person reads it, what is printed next begins a
    new line."""
    for stream in ("stdout", "stderr"):
        last, ours = _last.pop(stream, None), getattr(sys, stream)
        if last and ours and last.end not in b"\r\n" and ours.isatty():
            ours.write("\n")


def file_name(rank: int, stream: str) -> str:
    """The file that a stream of a rank goes to, in a folder for the output of all."""
    return f"rank{rank}.{stream}"


def open_pipes(rank: int, shown: str | Path = EVERY_RANK) -> tuple[list[Output], list[Connection]]:
    """For a rank about to be started: the launcher's ends of its two pipes, and the rank's ends.
    `shown`: see `LaunchConfig.output`."""
    outputs, ends = [], []
    for stream in ("stdout", "stderr"):
        ours, theirs = Pipe(duplex=False)
        outputs.append(Output(rank, stream, ours, shown))
        close_in_children(ours)
        ends.append(theirs)
    return outputs, ends
