"""What the recorded run would have taken on another machine, and our algorithms on more ranks.

The run is replayed: every rank does what it did, in its order, and waits for what it waited for. What a rank does
between two waits takes as long as it did. A wait ends when what it waited for is there: its transfer begins with the
last of the events that it needs, and takes what it took, less what another latency or bandwidth would save. Replayed
without a change, a recording takes as long as it did, if its waits tell of all dependencies.
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
from playground.see.analyse.timeline import Edge, Lane, Ref, Timeline, in_order, ref_of
from playground.see.analyse.transfers import MESSAGES, Dependency, Link, Transfers, Volume, algorithm_of, volumes
from playground.see.analyse.waits import Waits
from playground.see.record.recording import COMPUTE, MAIN, Event, Recording


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


DOUBLINGS = 3
"""How many times the number of ranks is doubled."""
NEGLIGIBLE = 0.01
"""Of the run's time: by so much longer some rank's work always takes."""
ADD = "add"
"""What adding two chunks is called."""
Place = tuple[str, str, str, int | None, bool, int]
"""Where in the program a point is: lane, kind, name, line, whether the event ends, and that for the so-many-th time."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What a change would do."""

    change: str
    seconds: float
    """What the run would take."""
    is_bound: bool = False
    """Whether it can only take longer than that: with messages of one size, latency and bandwidth are not told
    apart."""


@dataclass(frozen=True, kw_only=True)
class WhatIfs:
    recorded: float
    """What the run took."""
    replayed: float
    """What its replay takes if nothing is changed."""
    by_links: float
    """The same, if every transfer takes what the link says of its bytes, whatever the machine did to it."""
    changes: tuple[WhatIf, ...]
    straggler: int | None
    """The rank whose work took longer than that of the others by most; None if there is none, or fewer than three ranks
    to compare."""
    link: Link
    """Of the messages."""

    def error(self, seconds: float) -> float:
        """By how much of what was recorded this is too long (or, negative, too short)."""
        return seconds / self.recorded - 1 if self.recorded else 0.0


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """An algorithm of ours on the machine that the recording shows."""

    algorithm: str
    nbytes: int
    size: int
    """Number of ranks when it was recorded."""
    recorded: float
    """Median seconds from the last rank's coming to the last one's being done."""
    predicted: dict[int, float]
    """Seconds by the cost model, by number of ranks: `size`, and then more. Every rank has its own core and link."""
    shared: dict[int, float]
    """The same where all ranks share the cores of the one host that was recorded. Empty if there were several."""


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
    """The rank that worked longest beyond what ranks usually took at the same place of the program.

    Called as `Work`: what took it longer there takes the median of all ranks.
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
        """What its own work up to an edge usually takes."""

    def __call__(self, point: Point, seconds: float) -> float:
        return min(seconds, self.usual.get(point.edge, seconds))


def work_of(lane: str, points: Sequence[Point], replay: Replay) -> Iterator[tuple[Place, Edge, float]]:
    """What the work of a rank's lane took up to each edge, and at which place of the program that is."""
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
    """Every algorithm of ours that was recorded, by the cost model, on as many ranks and on more.

    Where all messages had one size and so latency and bandwidth are not told apart, these are upper bounds: more ranks
    never send larger messages.
    """
    gamma = seconds_per_byte_added(recording)
    machines = Machine(link.alpha, link.beta, gamma), Machine(link.alpha, link.beta, gamma, cores_of(recording))
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
            shared={} if machines[1].cores is None else predict(name, nbytes, size, machines[1]),
        )
        for (name, nbytes, size), calls in found.items()
        if has_cost(name)
    ]


def has_cost(algorithm: str) -> bool:
    """Whether the cost model tells what more ranks take: not where hosts matter, of which it is not known how many more
    there would be."""
    spec = ALGORITHMS.get(algorithm)
    return spec is not None and spec.cost is not None and not spec.needs_hosts


def predict(name: str, nbytes: int, size: int, machine: Machine) -> dict[int, float]:
    """Seconds on `size` ranks and on more."""
    cost = ALGORITHMS[name].cost
    assert cost is not None
    sizes = [size << doubling for doubling in range(DOUBLINGS + 1)]
    return {more: machine.seconds(cost.load()(Task(more, nbytes))) for more in sizes}


def cores_of(recording: Recording) -> int | None:
    """Of the one host that all ranks share; None where there are several, or it is not known."""
    one_host = len({rank.host for rank in recording.ranks}) == 1
    return recording.ranks[0].cores if one_host else None


def seconds_of(volume: Volume) -> float:
    """From the last rank's coming to the last one's being done."""
    events = volume.call.by_rank.values()
    return max(event.end for event in events) - max(event.start for event in events)


def seconds_per_byte_added(recording: Recording) -> float:
    """What adding a byte takes: 0 if nothing is recorded of that."""
    added = [event for event in recording.events(COMPUTE) if event.name == ADD and event.nbytes]
    nbytes = sum(event.nbytes for event in added)
    return sum(event.seconds for event in added) / nbytes if nbytes else 0.0
