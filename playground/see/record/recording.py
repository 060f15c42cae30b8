"""A recorded run: the events of all its ranks, on one clock. Does not import torch.

Times are seconds since the recording began, on rank 0's clock. Whatever is shown of a run is derived from this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from playground.runtime.backends import BACKENDS

SCHEMA = 1
"""Version of what a recording holds."""

SEND, RECEIVE = "send", "receive"
"""A point-to-point message, from when it is posted until it is known to be done: the call, or its wait, has returned.
(gloo completes a receive only inside `wait`: the message has arrived by then, not at that moment.)"""
COLLECTIVE = "collective"
"""A collective operation, from the call until it, or its wait, has returned. Of ours, the messages are its children."""
WAIT = "wait"
"""The time spent in `wait()`: for the events in `awaits`."""
COMPUTE = "compute"
"""Forward, backward, an optimizer's step, the addition of two chunks."""
GRADIENT = "gradient"
"""An instant: the gradient of the parameter `name` is ready."""
BUCKET = "bucket"
"""A bucket of gradients, from when it leaves until its sum is there."""
PHASE = "phase"
"""A span that others lie in: a step of a lesson, a training step, the reduce-scatter of a ring."""
VALUES = "values"
"""An instant: what the rank holds, in `values`."""
MOVE = "move"
"""A copy of a tensor from one device to another of the same process: see `Move`."""
KINDS = (SEND, RECEIVE, COLLECTIVE, WAIT, COMPUTE, GRADIENT, BUCKET, PHASE, VALUES, MOVE)
MAIN, BACKGROUND, DEVICE = "main", "background", "device"
"""Lanes of a rank: its main thread, its other threads, its GPU (on the GPU's own clock, put onto ours)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the program, the innermost one that is not torch's nor the recorder's."""

    file: str
    """Relative to the package or to the working folder."""
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank did."""

    number: int
    """Its place among the rank's events, in the order in which they began."""
    rank: int
    kind: str
    name: str
    """What was called (`isend`, `all_reduce`), or what it is (`forward`, `bucket 1`, `reduce-scatter`)."""
    start: float
    end: float
    """The same as `start` for an instant. Infinite if the rank was gone before it was over."""
    lane: str = MAIN
    parent: int | None = None
    """The number of the innermost event of the same rank in which it began. What goes on in the background, such as a
    bucket that leaves during backward, may be over later than that."""
    peer: int | None = None
    """The other rank of a message, or the root of a collective; None for a receive from anyone until it is over."""
    nbytes: int = 0
    """What moves: of a message its size, of a collective that of the tensor."""
    shape: tuple[int, ...] = ()
    group: tuple[int, ...] = ()
    """The ranks that take part, as numbers of the world."""
    message: int | None = None
    """Of a message: it is the so-many-th from its sender to its receiver with this group and tag, from 0 on. Both ends
    count, so a send and its receive have the same."""
    tag: int = 0
    offset: int | None = None
    """Of a chunk: where it begins in the flat tensor of the collective around it, in elements."""
    awaits: tuple[int, ...] = ()
    """Of a wait: the numbers of the events that it waited for."""
    source: int | None = None
    """Index in the recording's `sources`."""
    values: tuple[float, ...] | None = None
    """What the tensor held: when it was sent, when it had been received, after the collective. None if it is too large
    to be shown (`shape` is there), or was not asked for."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """What one rank recorded."""

    rank: int
    host: str
    device: str
    events: tuple[Event, ...]
    dropped: int = 0
    """Events for which there was no room."""
    is_cut_off: bool = False
    """Whether it ends before the rank had told that it ends: the rank was killed, or the file is not whole."""
    clock_bound: float = 0.0
    """Seconds by which its times may be off rank 0's clock."""
    cores: int | None = None
    """CPU cores that it could use; the ranks of one host share them. None if that is not known."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the rank only issues work, to a GPU: its calls, and its waits, return before that is done."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What all ranks of a run recorded."""

    command: tuple[str, ...]
    """As it was typed, without the program's name."""
    backend: str
    versions: dict[str, str]
    """Of Python, torch and the system."""
    began: float
    """When, in seconds since 1970, on rank 0's host."""
    ranks: tuple[RankRecording, ...]
    sources: tuple[Source, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    """The program's own files, by the name that sources have, as they were."""
    schema: int = SCHEMA

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def runs_ahead(self) -> bool:
        """Whether ranks do."""
        return any(rank.runs_ahead for rank in self.ranks)

    @property
    def batches_messages(self) -> bool:
        """Whether the backend wants the messages of one step as a batch."""
        return self.backend in BACKENDS and BACKENDS[self.backend].batches_messages

    @property
    def end(self) -> float:
        """When the last event ended, of those that did."""
        infinite = float("inf")
        return max((event.end for event in self.events() if event.end < infinite), default=0.0)

    def events(self, *kinds: str) -> Iterator[Event]:
        """Rank by rank, of these kinds; without any, all."""
        for rank in self.ranks:
            for event in rank.events:
                if not kinds or event.kind in kinds:
                    yield event


ARROW = " → "


class Move(NamedTuple):
    """A copy: which part of a training step made it, and the devices; `cpu` without a number is the host."""

    part: str
    source: str
    target: str


def name_of_move(part: str, source: str, target: str) -> str:
    """The event's name.

    >>> name_of_move("scatter", "cpu", "cpu:1")
    'scatter: cpu → cpu:1'
    """
    return f"{part}: {source}{ARROW}{target}"


def read_move(name: str) -> Move:
    """What an event of that name is.

    >>> read_move("scatter: cpu → cpu:1")
    Move(part='scatter', source='cpu', target='cpu:1')
    """
    part, _, devices = name.partition(": ")
    source, _, target = devices.partition(ARROW)
    return Move(part, source, target)
