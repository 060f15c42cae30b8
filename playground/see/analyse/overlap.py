"""The overlap of communication with computation, by two definitions.

- As torchtitan logs it: overlap = computation + communication - union, the seconds in which a rank did both.
- As the ladder has it: hidden = 1 - exposed / alone. Exposed is the time from the last gradient of a step until all of
  its communication is done; alone is the time of the same communication with no backward beside it. The ladder
  measures that; in a recording of any other run it is taken to be the time of the communication there.

Source: https://github.com/pytorch/torchtitan, its metrics
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from playground.see.analyse import BLOCKING, Interval, Lookup, Timeline, clip, ref_of, subtract, total, union
from playground.see.record import BUCKET, COLLECTIVE, COMPUTE, DEVICE, GRADIENT, Event, RankRecording, Recording

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
"""Names of computations in a training step."""
CALLS = (BUCKET, COLLECTIVE)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The overlap in one training step on one rank. Times are in seconds."""

    rank: int
    step: int
    """Index of the step, from 0 on."""
    compute: float
    """Time of computation, without the waits in it."""
    communication: float
    """Time in which a message, collective or bucket was posted and not yet over."""
    union: float
    """Time in which the rank did either."""
    exposed: float
    """Time from the last gradient until all communication is over."""
    sent: int
    """Number of buckets and collectives."""
    early: int
    """Number of those that left before the last gradient was ready: only they can be hidden."""

    @property
    def overlap(self) -> float:
        """The overlap by torchtitan's definition, in seconds."""
        return max(0.0, self.compute + self.communication - self.union)

    @property
    def hidden(self) -> float:
        """The hidden share, 0 to 1, by the ladder's definition."""
        return max(0.0, 1 - self.exposed / self.communication) if self.communication and self.early else 0.0


def overlaps(recording: Recording) -> list[Overlap]:
    """The overlap in every training step with communication, rank by rank."""
    timeline = Timeline(recording)
    waits = [*timeline.waits()]
    found = []
    for rank in recording.ranks:
        waited = Lookup(wait for wait in waits if wait.rank == rank.rank)
        steps = [step for step in passes_of(rank) if any(event.name == STEP for event in step)]
        found += [overlap_in(rank.rank, number, step, waited, timeline) for number, step in enumerate(steps)]
    return [overlap for overlap in found if overlap.communication]


def passes_of(recording: RankRecording) -> Iterator[list[Event]]:
    """The events of each forward and backward pass: from a forward that follows a backward up to the next such.

    Where gradients are accumulated, or only averaged, a pass is not a whole training step. The device's events are left
    out: it may do the work of a pass while the rank issues that of the next.
    """
    events = Lookup(event for event in recording.events if event.lane != DEVICE).events
    turns = [place for place, event in enumerate(events) if event.kind == COMPUTE and event.name in (FORWARD, BACKWARD)]
    pairs = ((events[before].name, events[after].name, after) for before, after in pairwise(turns))
    starts = [*turns[:1], *(after for *names, after in pairs if names == [BACKWARD, FORWARD])]
    for start, end in pairwise([*starts, len(events)]):
        yield events[start:end]


def overlap_in(rank: int, number: int, step: Sequence[Event], waited: Lookup, timeline: Timeline) -> Overlap:
    """The overlap in a step: until the optimizer is done, and the averaging of parameters if that comes after it."""
    done = {ref_of(event): as_done for event in step if (as_done := timeline.as_done(event)) is not None}
    ends = (event.end for event in done.values() if event.kind == BUCKET or (event.kind, event.name) == (COMPUTE, STEP))
    end = max(filter(isfinite, ends), default=step[0].start)
    messages = {ref: event for ref, event in done.items() if is_communication(event) and event.start < end}
    waits = [(wait.start, wait.end) for wait in waited.during(step[0].start, end)]
    compute = subtract(clip(intervals(event for event in done.values() if event.kind == COMPUTE), 0.0, end), waits)
    communication = union(intervals(messages.values()))
    last = max((event.end for event in done.values() if event.kind == GRADIENT), default=step[0].start)
    calls = {ref: event for ref, event in messages.items() if event.kind in CALLS}
    kinds = {ref: {timeline.by_ref[outer].kind for outer in timeline.around(ref)} for ref in calls}
    sent = [event for ref, event in calls.items() if kinds[ref].isdisjoint(CALLS)]
    return Overlap(
        rank=rank,
        step=number,
        compute=total(compute),
        communication=total(communication),
        union=total(union([*compute, *communication])),
        exposed=max([0.0, *(until - last for _, until in communication)]),
        sent=len(sent),
        early=sum(event.start < last for event in sent),
    )


def is_communication(event: Event) -> bool:
    """Whether the event moves bytes, as a barrier does not."""
    return event.kind in (*BLOCKING, BUCKET) and event.nbytes > 0 and isfinite(event.end)


def intervals(events: Iterable[Event]) -> list[Interval]:
    """The intervals of the events that are over."""
    return [(event.start, event.end) for event in events if isfinite(event.end)]
