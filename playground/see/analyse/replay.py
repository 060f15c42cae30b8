"""The recorded run once more, on another machine: every rank does what it did, in its order, and waits for what it
waited for.

What a rank does between two waits takes as long as it did. A wait ends when what it waited for is there: its transfer
begins with the last of the events that it needs, and takes what it took, less what another latency or bandwidth would
save. Replayed without a change, a recording takes as long as it did, if its waits tell of all dependencies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import isfinite

from playground.see.analyse.order import in_order
from playground.see.analyse.timeline import Edge, Lane, Ref, Timeline, ref_of
from playground.see.analyse.transfers import Dependency, Transfers
from playground.see.analyse.waits import Waits
from playground.see.record.recording import MAIN, Event


@dataclass(frozen=True)
class Point:
    """A moment on a lane of a rank: an event began or ended."""

    time: float
    event: Event
    is_end: bool

    @property
    def edge(self) -> Edge:
        return ref_of(self.event), self.is_end


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
        self.handed_over = dict(self.find_handed_over())
        """What a thread beside the main one has been given to do, from where it begins: with the last point of the main
        lane before it. None if there is none."""
        edges = {lane: [point.edge for point in points] for lane, points in self.lanes.items()}
        self.order = in_order(edges, self.needs)

    def find_handed_over(self) -> Iterator[tuple[Edge, Point | None]]:
        for (rank, name), points in self.lanes.items():
            main = self.lanes.get((rank, MAIN), [])
            times = [point.time for point in main]
            for point in points:
                if name != MAIN and not point.is_end and self.is_outermost(point.event):
                    last = bisect_right(times, point.time)
                    yield point.edge, main[last - 1] if last else None

    def is_outermost(self, event: Event) -> bool:
        """Whether it lies in no other event of its lane."""
        return event.parent is None or self.timeline.by_ref[event.rank, event.parent].lane != event.lane

    def needs(self, edge: Edge) -> Iterator[Edge]:
        """What has to be known before it, besides what comes before it on its lane."""
        ref, is_end = edge
        if is_end:
            for need in self.transfers.needs.get(ref, ()):
                yield from need.sources
        elif (last := self.handed_over.get(edge)) is not None:
            yield last.edge

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
        for edge, lane in self.order.items():
            run.go_on(lane, edge)
        return run.times


class Run:
    """One replay, as far as it has come."""

    def __init__(self, replay: Replay, change: Change) -> None:
        self.replay, self.change = replay, change
        self.times: dict[Lane, list[float]] = {lane: [] for lane in replay.lanes}
        self.known: dict[Edge, float] = {}
        """When an event begins and ends."""

    def go_on(self, lane: Lane, edge: Edge) -> None:
        """To the next point of a lane, which is this edge."""
        times, points = self.times[lane], self.replay.lanes[lane]
        place = len(times)
        point, previous = points[place], times[-1] if times else None
        if edge[1] and edge[0] in self.replay.transfers.needs:
            time = self.end_of_wait(edge[0])
        elif edge in self.replay.handed_over:
            time = max(previous or 0.0, self.handed_over_at(point))
        elif previous is None:
            time = point.time
        else:
            time = previous + self.change.work(point, point.time - points[place - 1].time)
        times.append(time)
        self.known[edge] = time

    def end_of_wait(self, ref: Ref) -> float:
        """When all it waits for is there."""
        transfers = self.replay.transfers
        begin = self.known[ref, False] + transfers.overhead[ref]
        return max([begin, *(self.arrival(need) for need in transfers.needs[ref])])

    def arrival(self, need: Dependency) -> float:
        """When this is there: its transfer begins with the last of what it needs."""
        return max([self.known[source] for source in need.sources]) + self.takes(need)

    def takes(self, need: Dependency) -> float:
        """What a transfer takes."""
        if need.link is None:
            return need.seconds
        took = need.link.seconds(need.nbytes) if self.change.by_links else need.seconds
        return max(0.0, took - need.link.change(self.change.latency, self.change.bandwidth, need.nbytes))

    def handed_over_at(self, point: Point) -> float:
        """When a thread beside the main one is given something to do: when the main one has come as far as it had
        then. (It begins with it when it is done with what came before.)"""
        last = self.replay.handed_over[point.edge]
        return point.time if last is None else self.known[last.edge] + point.time - last.time


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


def duration(lanes: Sequence[Sequence[float]]) -> float:
    """From the first moment to the last."""
    return max((max(times) for times in lanes if times), default=0.0) - min(
        (min(times) for times in lanes if times), default=0.0
    )
