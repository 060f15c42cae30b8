"""The duration of a recorded run on another machine, and of our algorithms on more ranks.

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
from dataclasses import dataclass
from heapq import heappop, heappush
from math import isfinite
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Machine, Task
from playground.see.analyse import Edge, Lane, Timeline, in_order, ref_of
from playground.see.analyse.transfers import MESSAGES, Dependency, Link, Transfers, Volume, algorithm_of, volumes
from playground.see.analyse.waits import Waits
from playground.see.record import COMPUTE, MAIN, Event, Recording


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
            times = [point.time for point in main]
            for point in points:
                parent = self.timeline.by_ref.get((rank, point.event.parent))  # type: ignore[arg-type]
                if name != MAIN and not point.is_end and (parent is None or parent.lane != name):
                    last = bisect_right(times, point.time)
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
        return duration([[point.time for point in points] for points in self.lanes.values()])

    def seconds(self, change: Change | None = None) -> float:
        """The duration of the run with this change."""
        return duration([*self.times(change or Change()).values()])

    def times(self, change: Change) -> dict[Lane, list[float]]:
        """The times of all points of every lane with this change."""
        times: dict[Lane, list[float]] = {lane: [] for lane in self.lanes}
        known: dict[Edge, float] = {}
        needs, overhead = self.transfers.needs, self.transfers.overhead
        for edge, lane in self.order.items():
            place, (ref, is_end) = len(times[lane]), edge
            point, previous = self.lanes[lane][place], times[lane][-1] if place else None
            if is_end and ref in needs:  # a wait ends when all its transfers are over
                over = [max(known[source] for source in need.sources) + takes(need, change) for need in needs[ref]]
                time = max([known[ref, False] + overhead[ref], *over])
            elif edge in self.handed_over:  # given as long after a point of the main lane as it was
                last = self.handed_over[edge]
                given = point.time if last is None else known[last.edge] + point.time - last.time
                time = max(previous or 0.0, given)
            elif previous is None:
                time = point.time
            else:
                time = previous + change.work(point, point.time - self.lanes[lane][place - 1].time)
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
    """The time from the first moment to the last."""
    used = [times for times in lanes if times]
    return max(map(max, used), default=0.0) - min(map(min, used), default=0.0)


DOUBLINGS = 3
"""Number of times that the number of ranks is doubled."""
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


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """An algorithm of ours on the machine that the recording shows."""

    algorithm: str
    nbytes: int
    size: int
    """Number of ranks when it was recorded."""
    recorded: float
    """Median seconds from the last rank's start to the last one's end."""
    predicted: dict[int, float]
    """Seconds by the cost model, by number of ranks from `size` on, where every rank has its own core and link."""
    shared: dict[int, float]
    """The same where all ranks share the cores of the one recorded host. Empty if there were several."""


def what_if(waits: Waits) -> WhatIfs:
    """Replay the recording unchanged, with other links, and without its straggler."""
    replay = Replay(waits)
    links = replay.transfers.links
    is_bound = any(link.nbytes is not None for link in links.values())
    work = Straggler(replay)
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
        self.usual = {
            taken[place][self.rank][0]: seconds
            for place, seconds in usual.items()
            if self.rank is not None and self.rank in taken[place]
        }
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


def more_ranks(recording: Recording, link: Link) -> list[Scaling]:
    """Predictions of the cost model for every recorded algorithm of ours, on as many ranks and on more.

    If all messages had one size, so that latency and bandwidth cannot be told apart, these are upper bounds: more ranks
    never send larger messages.
    """
    added = [event for event in recording.events(COMPUTE) if event.name == "add" and event.nbytes]
    gamma = sum(event.seconds for event in added) / (sum(event.nbytes for event in added) or 1)
    is_one_host = len({rank.host for rank in recording.ranks}) == 1
    cores = recording.ranks[0].cores if is_one_host else None
    machines = Machine(link.alpha, link.beta, gamma), Machine(link.alpha, link.beta, gamma, cores)
    found: dict[tuple[str, int, int], list[Volume]] = defaultdict(list)
    for volume in volumes(recording):
        found[algorithm_of(volume.call), volume.nbytes, len(volume.call.group)].append(volume)
    return [
        Scaling(
            algorithm=name,
            nbytes=nbytes,
            size=size,
            recorded=median(map(seconds_of, calls)),
            predicted=predict(name, nbytes, size, machines[0]),
            shared={} if cores is None else predict(name, nbytes, size, machines[1]),
        )
        for (name, nbytes, size), calls in found.items()
        if name in ALGORITHMS and ALGORITHMS[name].cost and not ALGORITHMS[name].needs_hosts
    ]


def predict(name: str, nbytes: int, size: int, machine: Machine) -> dict[int, float]:
    """Seconds on `size` ranks and on more, by number of ranks."""
    cost = ALGORITHMS[name].cost
    assert cost is not None
    sizes = [size << doubling for doubling in range(DOUBLINGS + 1)]
    return {more: machine.seconds(cost.load()(Task(more, nbytes))) for more in sizes}


def seconds_of(volume: Volume) -> float:
    """Seconds from the last rank's start to the last one's end."""
    events = volume.call.by_rank.values()
    return max(event.end for event in events) - max(event.start for event in events)
