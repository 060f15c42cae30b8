"""A recorded run: the events of all its ranks, which are on one host and read one clock. Does not
import torch.

Times are seconds since the recording began. Analyses, figures and the player derive from this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from playground.explain.hang import STRANGERS

SCHEMA = 2
"""Version of the format of a recording."""

SEND, RECEIVE = "send", "receive"
"""A point-to-point message, from the call that posts it until the call, or its wait, has returned.
(gloo completes a receive only inside `wait`: the message has arrived by then, not at that
moment.)"""
COLLECTIVE = "collective"
"""A collective operation, from the call until it, or its wait, has returned. Messages inside ours
are its children."""
WAIT = "wait"
"""The time spent in `wait()`, for the events in `awaits`."""
COMPUTE = "compute"
"""Forward, backward, an optimizer's step, the addition of two chunks."""
GRADIENT = "gradient"
"""An instant: the gradient of the parameter `name` is ready."""
BUCKET = "bucket"
"""A bucket of DistributedDataParallel's gradients, from when it leaves until its sum is there."""
PHASE = "phase"
"""A span around others: a step of a lesson, a training step, the reduce-scatter of a ring."""
VALUES = "values"
"""An instant: the rank holds `values`."""
MOVE = "move"
"""A copy of a tensor from one device to another of the same process: see `name_of_move`."""
KINDS = (SEND, RECEIVE, COLLECTIVE, WAIT, COMPUTE, GRADIENT, BUCKET, PHASE, VALUES, MOVE)
MAIN, BACKGROUND = "main", "background"
"""Lanes of a rank: its main thread, and its other threads."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the program: the innermost one outside of torch and the recorder."""

    file: str
    """Path relative to the package or to the working folder."""
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a rank."""

    number: int
    """Index among the rank's events, in the order of their starts."""
    rank: int
    kind: str
    name: str
    """The function called (`isend`, `all_reduce`), or a name (`forward`, `bucket 1`,
    `reduce-scatter`)."""
    start: float
    end: float
    """Equal to `start` for an instant. Infinite if the rank was gone before it was over."""
    lane: str = MAIN
    parent: int | None = None
    """Number of the innermost event of the same rank in which it began. Background events, such as
    a bucket that leaves during backward, may end later than their parent."""
    peer: int | None = None
    """The other rank of a message, or the root of a collective; None for a receive from anyone
    until it is over. If the group has no such rank: the number that was passed, and `STRANGERS`."""
    nbytes: int = 0
    """Size of the message, or of the collective's tensor."""
    shape: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    """Ranks of the world that take part."""
    message: int | None = None
    """Index of a message among those with its sender, receiver, group and tag. Both ends count, so
    a send and its receive have the same."""
    tag: int = 0
    offset: int | None = None
    """First element of a chunk in the flat tensor of the collective around it."""
    awaits: tuple[int, ...] = ()
    """Numbers of the events that a wait waited for."""
    source: int | None = None
    """Index in the recording's `sources`."""
    values: tuple[float, ...] | None = None
    """Contents of the tensor: when it was sent, had been received, or after the collective. None if
    it was too large (`shape` is there), or was not asked for."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_with_stranger(self) -> bool:
        """Whether it is a message to or from a rank that does not exist."""
        return self.kind in (SEND, RECEIVE) and (self.peer or 0) > STRANGERS // 2

    @property
    def number_of_peer(self) -> int | None:
        """`peer`, or the number that was passed if there is no such rank."""
        return (self.peer or 0) - STRANGERS if self.is_with_stranger else self.peer


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """The recording of one rank."""

    rank: int
    device: str
    events: tuple[Event, ...]
    dropped: int = 0
    """Number of events for which there was no room."""
    is_cut_off: bool = False
    """Whether it ends without the rank's own mark: the rank was killed, or the file is
    incomplete."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the rank only issues work to a GPU: its calls and waits return before that is
        done."""
        return self.device.startswith("cuda")


class Standstill(NamedTuple):
    """The diagnosis of a run that was ended because its ranks stood still."""

    sentence: str
    cure: str
    waits: tuple[tuple[int, tuple[int, ...]], ...]
    """Ranks that wait, each with the ranks that it waits for."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recording of a run."""

    command: tuple[str, ...]
    """The command as it was typed, without the program's name."""
    backend: str
    versions: dict[str, str]
    """Versions of Python, torch and the system."""
    began: float
    """Seconds since 1970."""
    ranks: tuple[RankRecording, ...]
    sources: tuple[SourceLine, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    """Contents of the program's own files, by `SourceLine.file`."""
    standstill: Standstill | None = None
    ended: str = ""
    """What was said of its failure, in lines; empty if it has not failed."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def runs_ahead(self) -> bool:
        return any(rank.runs_ahead for rank in self.ranks)

    @property
    def start(self) -> float:
        """The moment at which the first event began."""
        return min((event.start for event in self.events()), default=0.0)

    @property
    def end(self) -> float:
        """The last moment at which an event ended; or began, if it never ended."""
        return max(
            (event.end if isfinite(event.end) else event.start for event in self.events()),
            default=0.0,
        )

    def events(self, *kinds: str) -> Iterator[Event]:
        """The events of these kinds, or all, rank by rank."""
        return (
            event
            for rank in self.ranks
            for event in rank.events
            if not kinds or event.kind in kinds
        )


ARROW = " → "


class Move(NamedTuple):
    """A copy between two devices of a process; `cpu` without a number is the host."""

    part: str
    """The part of a training step that made it."""
    source: str
    target: str


def name_of_move(part: str, source: str, target: str) -> str:
    """The name of a copy's event: see `Move`.

    >>> name_of_move("scatter", "cpu", "cpu:1")
    'scatter: cpu → cpu:1'
    """
    return f"{part}: {source}{ARROW}{target}"


def read_move(name: str) -> Move:
    """The copy whose event has this name.

    >>> read_move("scatter: cpu → cpu:1")
    Move(part='scatter', source='cpu', target='cpu:1')
    """
    part, _, devices = name.partition(": ")
    source, _, target = devices.partition(ARROW)
    return Move(part, source, target)
