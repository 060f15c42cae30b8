"""The output of ranks, in whole lines: each has a pipe for stdout and one for stderr, and the launcher reads them.

Left to themselves ranks would write to one file at a time of their choice: on a terminal in the middle of each other's
lines, into a pipe when a buffer is full, and never if they are killed before.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from multiprocessing.connection import Connection, Pipe, wait

from playground.runtime.forks import close_in_children

READ_AT_ONCE = 2**16


def redirect(stdout: Connection, stderr: Connection) -> None:
    """In a rank: from now on, whatever this process prints goes into these pipes, a line at a time."""
    for number, (stream, pipe) in enumerate(((sys.stdout, stdout), (sys.stderr, stderr)), 1):
        stream.flush()  # what its import of the program has printed
        with pipe:
            os.dup2(pipe.fileno(), number)
    sys.stdout, sys.stderr = open_lines(1), open_lines(2)


def open_lines(number: int) -> io.TextIOWrapper:
    """A text stream to this file descriptor that hands over each line as soon as it is complete."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


class Output:
    """The launcher's end of one of these pipes."""

    def __init__(self, rank: int, stream: str, pipe: Connection) -> None:
        """`stream`: the name in `sys` of the launcher's own stream to which it goes, "stdout" or "stderr"."""
        self.rank, self.stream, self.pipe = rank, stream, pipe
        self.unfinished = ""
        """The beginning of a line whose end has not arrived yet."""
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def relay(self) -> None:
        """Pass on what has arrived, as far as its last line is whole."""
        arrived = os.read(self.pipe.fileno(), READ_AT_ONCE)
        if not arrived:  # the rank has ended
            self.pipe.close()
            return
        lines, newline, self.unfinished = f"{self.unfinished}{self.decode(arrived)}".rpartition("\n")
        if newline:
            self.write(lines)

    def relay_all(self) -> None:
        """Pass on all that has arrived by now, and a line that has no end as if it had one."""
        if not self.pipe.closed and wait([self.pipe], 0):
            self.relay()  # once: a rank that prints endlessly never lets the pipe run dry
        if text := self.unfinished + self.decode(b"", True):
            self.unfinished = ""
            self.write(text)

    def write(self, text: str) -> None:
        """Write whole lines; where a person reads them, each with the rank that it comes from."""
        stream = getattr(sys, self.stream)
        if stream is None:  # there is no console at all
            return
        if stream.isatty():
            label = f"[rank {self.rank}] "  # dimmed unless the terminal or the user does not want that: no-color.org
            if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
                label = f"\033[2m{label}\033[0m"
            text = "\n".join(f"{label}{line}" for line in text.split("\n"))
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()


def open_pipes(rank: int) -> tuple[list[Output], list[Connection]]:
    """For a rank about to be started: the launcher's ends of its two pipes, and the ends for `redirect`."""
    outputs, ends = [], []
    for stream in ("stdout", "stderr"):
        ours, theirs = Pipe(duplex=False)
        outputs.append(Output(rank, stream, ours))
        close_in_children(ours)
        ends.append(theirs)
    return outputs, ends
