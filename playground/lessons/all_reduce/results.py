"""What was recorded of an algorithm: its messages, and what they add up to. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from playground.lessons.all_reduce.timeline import Start, timeline

ELEMENT = 8
"""Bytes of an element of the lesson's tensors."""
Span = tuple[int, int] | None
"""[first, stop) of the tensor's elements that a message is; None for memory beside it."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A message that a rank sends."""

    to: int
    values: list[int]
    where: Span


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A message that a rank is to receive."""

    source: int
    where: Span

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        return {"from": self.source, "where": self.where}


@dataclass(frozen=True, kw_only=True)
class Note:
    """One start of messages, recorded when they were started."""

    phase: str
    """What the algorithm was at, where its phases have names."""
    holds: list[int]
    """The tensor at that moment."""
    sends: list[Outgoing]
    receives: list[Incoming]

    @property
    def ranks(self) -> Start:
        """Those it sends to, and those it receives from."""
        return [message.to for message in self.sends], [message.source for message in self.receives]

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        sends = [asdict(message) for message in self.sends]
        return {"holds": self.holds, "sends": sends, "receives": [message.document for message in self.receives]}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run of an algorithm on one rank."""

    before: list[int]
    """The rank's input."""
    after: list[int]
    """Its output."""
    messages: int
    """That it sent."""
    sent: int
    """Bytes that it sent."""
    notes: list[Note]
    """Its messages, start by start."""

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        notes = [note.document for note in self.notes]
        return {
            "before": self.before, "after": self.after, "messages": self.messages, "sent": self.sent, "notes": notes
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Load:
    """What an algorithm costs, on all its ranks."""

    steps: int
    """One after the other."""
    messages: list[int]
    """Sent, by rank."""
    sent: list[int]
    """Bytes, by rank."""
    busiest: int
    """Bytes that the busiest rank sends and receives."""
    in_all: int
    """Bytes sent by all ranks together."""


def steps_of(traces: Sequence[Trace]) -> list[dict[int, int]]:
    """For each step of the whole, which of its notes each rank was at: {rank: position}."""
    return timeline([[note.ranks for note in trace.notes] for trace in traces])


def load_of(traces: Sequence[Trace]) -> Load:
    """What an algorithm costs, from what every rank recorded."""
    received = [0] * len(traces)
    for trace in traces:
        for message in (message for note in trace.notes for message in note.sends):
            received[message.to] += ELEMENT * len(message.values)
    sent = [trace.sent for trace in traces]
    return Load(
        steps=len(steps_of(traces)),
        messages=[trace.messages for trace in traces],
        sent=sent,
        busiest=max(map(sum, zip(sent, received, strict=True))),
        in_all=sum(sent),
    )
