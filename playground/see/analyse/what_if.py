"""What the recorded run would have taken on another machine, and our algorithms on more ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Machine, Task
from playground.see.analyse.links import Link
from playground.see.analyse.replay import Change, Point, Replay
from playground.see.analyse.timeline import Edge
from playground.see.analyse.transfers import MESSAGES
from playground.see.analyse.volumes import Volume, algorithm_of, volumes
from playground.see.analyse.waits import Waits
from playground.see.record.recording import COMPUTE, Recording

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
        recorded=replay.recorded, replayed=replay.seconds(), by_links=replay.seconds(Change(by_links=True)),
        changes=tuple(changes), straggler=work.rank, link=links.get(MESSAGES, Link(0.0, 0.0, nbytes=0)),
    )  # fmt: skip


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
            algorithm=name, nbytes=nbytes, size=size, recorded=median(map(seconds_of, calls)),
            predicted=predict(name, nbytes, size, machines[0]),
            shared={} if machines[1].cores is None else predict(name, nbytes, size, machines[1]),
        )
        for (name, nbytes, size), calls in found.items()
        if has_cost(name)
    ]  # fmt: skip


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
