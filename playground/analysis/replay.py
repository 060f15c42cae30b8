"""The recorded run once more, on another machine: every rank does what it did, in its order, and waits for what it
waited for.

What a rank does between two waits takes as long as it did. A wait ends when what it waited for is there: its transfer
begins with the last of the events that it needs, and takes what it took, less what another latency or bandwidth would
save. Replayed without a change, a recording takes as long as it did, if its waits tell of all dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import isfinite

from playground.analysis.timeline import Lane, Ref, Timeline, ref_of
from playground.analysis.transfers import Dependency, Transfers
from playground.analysis.waits import Waits
from playground.recording.recording import MAIN, Event


@dataclass(frozen=True)
class Point:
    """A moment on a lane of a rank: an event began or ended."""

    time: float
    event: Event
    is_end: bool


Work = Callable[[Point, float], float]
"""What a rank's work up to a point takes, if it took so many seconds."""


@dataclass(frozen=True)
class Change:
    """What is different in a replay."""

    latency: float = 1.0
    """So many times as long."""
    bandwidth: float = 1.0
    """So many times as much."""
    work: Work = lambda point, seconds: seconds
    by_links: bool = False
    """Whether a transfer takes what its link says, instead of what it took."""


class Replay:
    """A recording, taken apart into what depends on what."""

    def __init__(self, waits: Waits) -> None:
        self.transfers = Transfers(waits)
        self.timeline = timeline = waits.timeline
        self.lanes = {lane: [*points_of(events, timeline)] for lane, events in sorted(timeline.lanes.items())}
        self.before = {(rank, name): last_before(points, self.lanes.get((rank, MAIN), []))
                       for (rank, name), points in self.lanes.items() if name != MAIN}  # fmt: skip

    def is_handed_over(self, point: Point) -> bool:
        """Whether it is the beginning of what a thread beside the main one has been given to do."""
        event = point.event
        if event.lane == MAIN or point.is_end:
            return False
        return event.parent is None or self.timeline.by_ref[event.rank, event.parent].lane != event.lane

    @property
    def recorded(self) -> float:
        """Seconds from the first event to the end of the last one."""
        return duration([[point.time for point in points] for points in self.lanes.values()])

    def seconds(self, change: Change | None = None) -> float:
        """What the run would take with this change."""
        return duration([*self.times(change or Change()).values()])

    def times(self, change: Change) -> dict[Lane, list[float]]:
        """When every point of every lane would be."""
        run = Run(self, change)
        while any(run.advance(lane) for lane in self.lanes):
            pass
        return run.times


class Run:
    """One replay, as far as it is known yet."""

    def __init__(self, replay: Replay, change: Change) -> None:
        self.replay, self.change = replay, change
        self.times: dict[Lane, list[float]] = {lane: [] for lane in replay.lanes}
        self.known: dict[tuple[Ref, bool], float] = {}
        """When an event begins and ends."""

    def advance(self, lane: Lane) -> bool:
        """Go on until something has to be known first; whether any point was new."""
        points, times = self.replay.lanes[lane], self.times[lane]
        begun = len(times)
        while len(times) < len(points) and (time := self.time_of(lane, len(times))) is not None:
            point = points[len(times)]
            times.append(time)
            self.known[ref_of(point.event), point.is_end] = time
        return len(times) > begun

    def time_of(self, lane: Lane, place: int) -> float | None:
        """When a point is; None if that cannot be known yet."""
        point = self.replay.lanes[lane][place]
        ref = ref_of(point.event)
        if point.is_end and ref in self.replay.transfers.needs:
            return self.end_of_wait(ref)
        if self.replay.is_handed_over(point):
            return self.start_beside(lane, place)
        if place == 0:
            return point.time
        since = point.time - self.replay.lanes[lane][place - 1].time
        return self.times[lane][-1] + self.change.work(point, since)

    def end_of_wait(self, ref: Ref) -> float | None:
        """When all it waits for is there."""
        needed = self.replay.transfers.needs[ref]
        if any(source not in self.known for need in needed for source in need.sources):
            return None
        arrivals = [max(self.known[source] for source in need.sources) + self.takes(need) for need in needed]
        return max([self.known[ref, False] + self.replay.transfers.overhead[ref], *arrivals])

    def takes(self, need: Dependency) -> float:
        """What a transfer takes."""
        if need.link is None:
            return need.seconds
        took = need.link.seconds(need.nbytes) if self.change.by_links else need.seconds
        return max(0.0, took - need.link.change(self.change.latency, self.change.bandwidth, need.nbytes))

    def start_beside(self, lane: Lane, place: int) -> float | None:
        """When a thread beside the main one is given something to do: when the main one has come as far as it had then.
        It does not begin before it is done with what came before."""
        main, last = (lane[0], MAIN), self.replay.before[lane][place]
        point, previous = self.replay.lanes[lane][place], self.times[lane][-1] if place else 0.0
        if last is None:
            return max(previous, point.time)
        if last >= len(self.times[main]):
            return None
        return max(previous, self.times[main][last] + point.time - self.replay.lanes[main][last].time)


def points_of(events: Sequence[Event], timeline: Timeline) -> Iterator[Point]:
    """A lane in its order: of events inside each other, those inside end first."""
    ends: list[tuple[float, int, Event]] = []
    for event in events:
        while ends and ends[0][0] <= event.start:
            time, _, over = heappop(ends)
            yield Point(time, over, is_end=True)
        yield Point(event.start, event, is_end=False)
        is_over_later = ref_of(event) in timeline.waited_for and not timeline.is_made_of_messages(event)
        if isfinite(event.end) and not is_over_later:
            heappush(ends, (event.end, -event.number, event))
    while ends:
        time, _, over = heappop(ends)
        yield Point(time, over, is_end=True)


def last_before(points: Sequence[Point], main: Sequence[Point]) -> list[int | None]:
    """For every point, which point of the main lane was the last before it."""
    places: list[int | None] = []
    place = -1
    for point in points:
        while place + 1 < len(main) and main[place + 1].time <= point.time:
            place += 1
        places.append(place if place >= 0 else None)
    return places


def duration(lanes: Sequence[Sequence[float]]) -> float:
    """From the first moment to the last."""
    return max((max(times) for times in lanes if times), default=0.0) - min(
        (min(times) for times in lanes if times), default=0.0
    )
