"""The duration of a recorded run on another machine.

The run is replayed: every rank does the same in the same order, with the same waits. The work between two waits takes
as long as it did. A wait ends when its transfers are over: each begins with the last of the events that it needs, and
takes as long as it did, less what another latency or bandwidth would save. Replayed without a change, a recording takes
as long as it did, if its waits tell of all dependencies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import isfinite
from statistics import median

from playground.see.analyse import BLOCKING, Edge, Lane, Ref, Timeline, in_order, ref_of
from playground.see.analyse.waits import Wait, Waits
from playground.see.record import COLLECTIVE, MAIN, Event

SPREAD = 2
"""Minimum ratio of the largest to the smallest transfer, in bytes, for a line to be fitted."""


@dataclass(frozen=True)
class Link:
    """A transfer of n bytes takes alpha + n * beta seconds."""

    alpha: float
    """The latency."""
    beta: float
    """Seconds per byte: the inverse of the bandwidth."""
    nbytes: int | None = None
    """The size of all transfers if they were about equal: then alpha has all, as it cannot be told apart from beta."""

    def seconds(self, nbytes: int) -> float:
        return self.alpha + nbytes * self.beta

    def change(self, latency: float, bandwidth: float, nbytes: int) -> float:
        """Seconds that a transfer saves (or, negative, loses) with these multiples of the latency and the bandwidth.

        If alpha and beta cannot be told apart, the larger change is taken: it is a bound.
        """
        if self.nbytes is not None:
            return self.alpha * max(1 - latency, 1 - 1 / bandwidth, key=abs)
        return self.alpha * (1 - latency) + nbytes * self.beta * (1 - 1 / bandwidth)


Transfer = tuple[int, float]
"""Bytes and seconds."""


def fit_link(transfers: Sequence[Transfer]) -> Link:
    """Fit alpha and beta, neither below 0, with the smallest sum of squared relative errors over the sizes.

    The median of each size is taken: other load on the machine delays some transfers and not others.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in transfers:
        by_size[nbytes].append(seconds)
    points = [(nbytes, max(median(its), 1e-9)) for nbytes, its in sorted(by_size.items())]
    if not points:
        return Link(0.0, 0.0, nbytes=0)
    if points[-1][0] < SPREAD * max(1, points[0][0]):
        return Link(median(seconds for _, seconds in transfers), 0.0, nbytes=points[-1][0])
    alpha_only = Link(sum(1 / y for _, y in points) / sum(y**-2 for _, y in points), 0.0)
    beta_only = Link(0.0, sum(x / y for x, y in points) / sum((x / y) ** 2 for x, y in points))
    allowed = [each for each in (weighted_line(points), alpha_only, beta_only) if each.alpha >= 0 and each.beta >= 0]
    return min(allowed, key=lambda link: sum((link.seconds(x) / y - 1) ** 2 for x, y in points))


def weighted_line(points: Sequence[Transfer]) -> Link:
    """The line with the smallest sum of squared relative errors: the weight of a point is 1 / seconds squared."""
    total = sum(y**-2 for _, y in points)
    mean_x = sum(y**-2 * x for x, y in points) / total
    mean_y = sum(y**-2 * y for _, y in points) / total
    slope = sum(y**-2 * (x - mean_x) * (y - mean_y) for x, y in points)
    beta = slope / sum(y**-2 * (x - mean_x) ** 2 for x, y in points)
    return Link(mean_y - beta * mean_x, beta)


MESSAGES = "messages"
"""The kind of transfers that are sends and receives. Each collective of the backend is a kind, by its name."""


@dataclass(frozen=True)
class Dependency:
    """A transfer that a wait waited for."""

    sources: tuple[Edge, ...]
    """The edges that must come before it can begin."""
    begins: float
    """The time of the last of them, in seconds."""
    seconds: float
    """Its duration."""
    nbytes: int
    link: Link | None
    """None if the wait was for another thread of the same rank."""


class Transfers:
    """The dependencies of all waits of a recording."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self.links = self.fit()
        """The links by kind of transfer."""
        self.needs: dict[Ref, list[Dependency]] = {}
        """The dependencies of every wait."""
        self.overhead: dict[Ref, float] = {}
        """Seconds that a wait takes if all its transfers are over."""
        for wait in waits.all:
            self.resolve(wait)

    def fit(self) -> dict[str, Link]:
        """Fit the links to transfers that were waited for from their beginning or, if a kind has none, to all of it."""
        sure: dict[str, list[Transfer]] = defaultdict(list)
        others: dict[str, list[Transfer]] = defaultdict(list)
        for wait in self.waits.all:
            if wait.awaited is not None and not self.waits.timeline.is_made_of_messages(wait.awaited):
                seconds = wait.event.end - self.sources(wait.awaited, wait.event)[1]
                (sure if wait.late > 0 else others)[kind_of(wait.awaited)].append((wait.awaited.nbytes, seconds))
        return {kind: fit_link(sure[kind] or others[kind]) for kind in sorted(sure.keys() | others.keys())}

    def resolve(self, wait: Wait) -> None:
        """Find the dependencies of this wait. If none can have delayed it, all of it is overhead."""
        event = wait.event
        needs = [need for each in self.waits.timeline.awaited(event) if (need := self.dependency(each, event))]
        decisive = max(needs, key=lambda need: need.begins + need.seconds, default=None)
        blocked = decisive is not None and decisive.begins + decisive.seconds > event.start
        self.overhead[ref_of(event)] = 0.0 if blocked else event.seconds
        self.needs[ref_of(event)] = [
            replace(need, seconds=event.end - need.begins) if blocked and need is decisive else need for need in needs
        ]

    def dependency(self, awaited: Event, wait: Event) -> Dependency | None:
        """The dependency of `wait` on this event. Its duration is the link's, limited by the end of the wait."""
        if self.waits.timeline.is_made_of_messages(awaited):
            over = ((ref_of(awaited), True),)
            return Dependency(over, awaited.end, 0.0, 0, None) if awaited.end <= wait.end else None
        link = self.links.get(kind_of(awaited))
        if link is None or awaited.kind not in BLOCKING:
            return None
        sources, begins = self.sources(awaited, wait)
        seconds = min(link.seconds(awaited.nbytes), wait.end - begins)
        return Dependency(sources, begins, seconds, awaited.nbytes, link)

    def sources(self, awaited: Event, wait: Event) -> tuple[tuple[Edge, ...], float]:
        """The starts of this event and of its peers that came before the wait was over, and the time of the last."""
        events = [awaited, *(peer for peer in self.waits.peers(awaited) if peer.start <= wait.end)]
        return tuple((ref_of(event), False) for event in events), max(event.start for event in events)


def kind_of(event: Event) -> str:
    """The kind of transfer."""
    return event.name if event.kind == COLLECTIVE else MESSAGES


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
"""The seconds of a rank's work up to a point in the replay, given those of the recording."""


@dataclass(frozen=True)
class Change:
    """The changes in a replay."""

    latency: float = 1.0
    """Multiple of the recorded latency."""
    bandwidth: float = 1.0
    """Multiple of the recorded bandwidth."""
    work: Work = lambda point, seconds: seconds
    by_links: bool = False
    """Whether a transfer takes as long as its link says, instead of as long as it did."""


class Replay:
    """A recording as points of time and their dependencies."""

    def __init__(self, waits: Waits) -> None:
        self.transfers = Transfers(waits)
        self.timeline = timeline = waits.timeline
        self.lanes = {lane: [*points_of(events, timeline)] for lane, events in sorted(timeline.lanes.items())}
        self.handed_over = dict(self.find_handed_over())
        """The edges at which a background thread begins work it was given, each with the last point of the main lane
        before it, if there is one."""
        edges = {lane: [point.edge for point in points] for lane, points in self.lanes.items()}
        self.order = in_order(edges, self.needs)

    def find_handed_over(self) -> Iterator[tuple[Edge, Point | None]]:
        """The outermost events of every lane beside the main one."""
        for (rank, name), points in self.lanes.items():
            main = self.lanes.get((rank, MAIN), [])
            for point in points:
                parent = self.timeline.by_ref.get((rank, point.event.parent))  # type: ignore[arg-type]
                if name != MAIN and not point.is_end and (parent is None or parent.lane != name):
                    last = bisect_right(main, point.time, key=lambda other: other.time)
                    yield point.edge, main[last - 1] if last else None

    def needs(self, edge: Edge) -> Iterator[Edge]:
        """The edges that must come before this one, besides those before it on its lane."""
        ref, is_end = edge
        if is_end:
            for need in self.transfers.needs.get(ref, ()):
                yield from need.sources
        elif (last := self.handed_over.get(edge)) is not None:
            yield last.edge

    @property
    def recorded(self) -> float:
        """Seconds from the first event to the end of the last one."""
        return duration([point.time for points in self.lanes.values() for point in points])

    def seconds(self, change: Change | None = None) -> float:
        """The duration of the run with this change."""
        return duration([time for times in self.times(change or Change()).values() for time in times])

    def times(self, change: Change) -> dict[Lane, list[float]]:
        """The times of all points of every lane with this change."""
        times: dict[Lane, list[float]] = {lane: [] for lane in self.lanes}
        known: dict[Edge, float] = {}
        needs, overhead = self.transfers.needs, self.transfers.overhead
        for edge, lane in self.order.items():
            place, (ref, is_end) = len(times[lane]), edge
            point, previous = self.lanes[lane][place], times[lane][-1] if place else 0.0
            if is_end and ref in needs:  # a wait ends when all its transfers are over
                over = [max(known[source] for source in need.sources) + takes(need, change) for need in needs[ref]]
                time = max([known[ref, False] + overhead[ref], *over])
            elif edge in self.handed_over:  # given as long after a point of the main lane as it was
                last = self.handed_over[edge]
                given = point.time if last is None else known[last.edge] + point.time - last.time
                time = max(previous, given)
            elif place:
                time = previous + change.work(point, point.time - self.lanes[lane][place - 1].time)
            else:
                time = point.time
            times[lane].append(time)
            known[edge] = time
        return times


def takes(need: Dependency, change: Change) -> float:
    """The seconds of a transfer with this change."""
    if need.link is None:
        return need.seconds
    took = need.link.seconds(need.nbytes) if change.by_links else need.seconds
    return max(0.0, took - need.link.change(change.latency, change.bandwidth, need.nbytes))


def points_of(events: Sequence[Event], timeline: Timeline) -> Iterator[Point]:
    """The points of a lane in order. Of nested events, the inner ones end first."""
    ends: list[tuple[float, int, Event]] = []
    for event in (*events, None):
        while ends and (event is None or ends[0][0] <= event.start):
            time, _, over = heappop(ends)
            yield Point(time, over, is_end=True)
        if event is not None:
            yield Point(event.start, event, is_end=False)
            is_over_later = ref_of(event) in timeline.waited_for and not timeline.is_made_of_messages(event)
            if isfinite(event.end) and not is_over_later:
                heappush(ends, (event.end, -event.number, event))


def duration(times: Sequence[float]) -> float:
    """The time from the first moment to the last."""
    return max(times, default=0.0) - min(times, default=0.0)


NEGLIGIBLE = 0.01
"""Share of the run's time by which some rank's work is always longer."""
Place = tuple[str, str, str, int | None, bool, int]
"""A point's place in the program: lane, kind, name, line, whether the event ends, and the index among equal ones."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The effect of a change."""

    change: str
    seconds: float
    """Duration of the run with it."""
    is_bound: bool = False
    """Whether `seconds` is a lower bound: with messages of one size, latency and bandwidth cannot be told apart."""


@dataclass(frozen=True, kw_only=True)
class WhatIfs:
    recorded: float
    """Duration of the run."""
    replayed: float
    """Duration of its replay without a change."""
    by_links: float
    """The same, if every transfer takes as long as its link says."""
    changes: tuple[WhatIf, ...]
    straggler: int | None
    """The rank whose work exceeds that of the others by most; None if there is none, or fewer than three ranks."""
    link: Link
    """The link of the messages."""

    def error(self, seconds: float) -> float:
        """The relative error of a duration against the recorded one."""
        return seconds / self.recorded - 1 if self.recorded else 0.0


def what_if(waits: Waits) -> WhatIfs:
    """Replay the recording unchanged, with other links, and without its straggler."""
    replay = Replay(waits)
    links, work = replay.transfers.links, Straggler(replay)
    is_bound = any(link.nbytes is not None for link in links.values())
    changes = [
        WhatIf(change="half the latency", seconds=replay.seconds(Change(latency=0.5)), is_bound=is_bound),
        WhatIf(change="twice the bandwidth", seconds=replay.seconds(Change(bandwidth=2.0)), is_bound=is_bound),
    ]
    if work.rank is not None:
        changes.append(WhatIf(change=f"rank {work.rank} no straggler", seconds=replay.seconds(Change(work=work))))
    return WhatIfs(
        recorded=replay.recorded,
        replayed=replay.seconds(),
        by_links=replay.seconds(Change(by_links=True)),
        changes=tuple(changes),
        straggler=work.rank,
        link=links.get(MESSAGES, Link(0.0, 0.0, nbytes=0)),
    )


class Straggler:
    """The rank whose work exceeded the median of all ranks, at the same places of the program, by most.

    As `Work`, it limits that rank's work to these medians.
    """

    def __init__(self, replay: Replay) -> None:
        taken: dict[Place, dict[int, tuple[Edge, float]]] = defaultdict(dict)
        for (rank, lane), points in replay.lanes.items():
            for place, edge, seconds in work_of(lane, points, replay):
                taken[place][rank] = edge, seconds
        usual = {place: median(seconds for _, seconds in its.values()) for place, its in taken.items() if len(its) > 2}
        excess: dict[int, float] = defaultdict(float)
        for place, seconds in usual.items():
            for rank, (_, its_seconds) in taken[place].items():
                excess[rank] += max(0.0, its_seconds - seconds)
        slowest = max(excess, key=lambda rank: (excess[rank], -rank), default=None)
        self.rank = None if slowest is None or excess[slowest] < NEGLIGIBLE * replay.recorded else slowest
        its = {place: by_rank[self.rank] for place, by_rank in taken.items() if self.rank in by_rank}
        self.usual = {its[place][0]: seconds for place, seconds in usual.items() if place in its}
        """Median seconds of the work up to each of its edges."""

    def __call__(self, point: Point, seconds: float) -> float:
        return min(seconds, self.usual.get(point.edge, seconds))


def work_of(lane: str, points: Sequence[Point], replay: Replay) -> Iterator[tuple[Place, Edge, float]]:
    """The work of a rank's lane: the place in the program of each edge, and the seconds of work up to it."""
    seen: dict[tuple[str, str, int | None, bool], int] = defaultdict(int)
    for before, point in itertools.pairwise(points):
        event, edge = point.event, point.edge
        key = (event.kind, event.name, event.source, point.is_end)
        place = (lane, *key, seen[key])
        seen[key] += 1
        is_wait = point.is_end and edge[0] in replay.transfers.needs
        if not is_wait and edge not in replay.handed_over:
            yield place, edge, point.time - before.time
