"""Transfers: messages and bytes of our algorithms beside their closed forms; latency and bandwidth of the links; and
those that every wait depends on, from which a run is replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.auto import choose
from playground.algorithms.cost_model import ELEMENT, Counts, Task
from playground.algorithms.pipelined_ring import IN_FLIGHT
from playground.algorithms.ring import ring_cost
from playground.see.analyse import BLOCKING, CollectiveCall, Edge, Ref, Timeline, match_collectives, ref_of
from playground.see.analyse.waits import Wait, Waits
from playground.see.record import COLLECTIVE, RECEIVE, SEND, Event, Recording

FEW = IN_FLIGHT
"""Elements per rank below which some pieces of a chunk may be empty."""
HALVES = ("reduce-scatter", "all-gather")
"""Our collectives that are one half of the ring."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """The messages of one collective of ours."""

    call: CollectiveCall
    nbytes: int
    """Bytes of the whole tensor."""
    messages: tuple[int, ...]
    """Number of messages sent, by rank of the group."""
    sent: tuple[int, ...]
    """Bytes of these messages, by rank of the group."""
    expected: Counts
    """Messages and bytes of all ranks together, by the closed form."""

    @property
    def agrees(self) -> bool:
        """Whether messages and bytes are those of the closed form."""
        return (sum(self.messages), sum(self.sent)) == (self.expected.messages, self.expected.bytes)


def volumes(recording: Recording) -> list[Volume]:
    """The volume of every collective of ours that all its ranks called, in the order in which they began.

    Those without a closed form are left out, such as the hierarchical one on hosts with different numbers of ranks.
    """
    timeline, inside = Timeline(recording), dict[Ref, list[Event]]()
    for event in recording.events(SEND, RECEIVE):
        for outer in timeline.around(ref_of(event)):
            inside.setdefault(outer, []).append(event)
    found = []
    for call in match_collectives(recording):
        is_ours = algorithm_of(call) in (*ALGORITHMS, *HALVES)
        if not is_ours or not call.is_whole or inside.keys().isdisjoint(map(ref_of, call.by_rank.values())):
            continue
        expected = expected_of(call, recording)
        if expected is not None:
            its = (inside.get(ref_of(call.by_rank[rank]), []) for rank in call.group)
            sends = [[event.nbytes for event in messages if event.kind == SEND] for messages in its]
            messages, sent = tuple(map(len, sends)), tuple(map(sum, sends))
            found.append(Volume(call=call, nbytes=whole(call)[0], messages=messages, sent=sent, expected=expected))
    return found


def algorithm_of(call: CollectiveCall) -> str:
    """The name of its algorithm in the table: binary-tree for `all_reduce (binary_tree)`."""
    return call.name.removeprefix("all_reduce (").removesuffix(")").replace("_", "-")


def expected_of(call: CollectiveCall, recording: Recording) -> Counts | None:
    """The closed form, for the ranks and the tensor of this call; None if there is none."""
    size, (nbytes, elements) = len(call.group), whole(call)
    few = elements < FEW * size  # then some messages have no elements, and the number of elements counts
    ranks_per_host = ranks_per_host_of(call.group, recording)
    task = Task(size, elements * ELEMENT if few else nbytes, ranks_per_host or 1, recording.batches_messages)
    name = algorithm_of(call)
    if name in HALVES:
        counts = ring_cost(task).total.times(1 / 2)
    else:
        if not ALGORITHMS[name].has_messages:
            code = choose(nbytes, size, len(set(hosts_of(call.group, recording))))
            name = next(each for each, spec in ALGORITHMS.items() if spec.code.load() is code)
        cost = ALGORITHMS[name].cost
        if cost is None or (ALGORITHMS[name].needs_hosts and ranks_per_host is None):
            return None
        counts = cost.load()(task).total
    itemsize = nbytes // max(1, elements)
    return Counts(counts.messages, counts.bytes * itemsize / ELEMENT if few else counts.bytes)


def hosts_of(group: Sequence[int], recording: Recording) -> list[str]:
    """The hosts of these ranks."""
    hosts = {rank.rank: rank.host for rank in recording.ranks}
    return [hosts[rank] for rank in group]


def ranks_per_host_of(group: Sequence[int], recording: Recording) -> int | None:
    """The number of ranks of the group on every host; the last may have fewer. None if hosts differ otherwise."""
    hosts = hosts_of(group, recording)
    first = hosts.count(hosts[0])
    blocks = [hosts[begin : begin + first] for begin in range(0, len(hosts), first)]
    whole = all(len(set(block)) == 1 for block in blocks)
    return first if whole and len({block[0] for block in blocks}) == len(blocks) else None


def whole(call: CollectiveCall) -> tuple[int, int]:
    """Bytes and elements of the whole tensor. A rank's input is recorded: to an all-gather that is its share."""
    shares, events = len(call.group) if algorithm_of(call) == "all-gather" else 1, call.by_rank.values()
    return shares * max(event.nbytes for event in events), shares * max(prod(event.shape) for event in events)


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
    weighted = [(y**-2, x, y) for x, y in points]
    total = sum(w for w, _, _ in weighted)
    mean_x = sum(w * x for w, x, _ in weighted) / total
    mean_y = sum(w * y for w, _, y in weighted) / total
    beta = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in weighted) / sum(
        w * (x - mean_x) ** 2 for w, x, _ in weighted
    )
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
                begins = max(when for _, when in self.sources(wait.awaited, wait.event))
                seconds = wait.event.end - begins
                (sure if wait.late > 0 else others)[kind_of(wait.awaited)].append((wait.awaited.nbytes, seconds))
        return {kind: fit_link(sure[kind] or others[kind]) for kind in sorted(sure.keys() | others.keys())}

    def resolve(self, wait: Wait) -> None:
        """Find the dependencies of this wait. If none can have delayed it, all of it is overhead."""
        event = wait.event
        found = [self.dependency(awaited, event) for awaited in self.waits.timeline.awaited(event)]
        needs = [need for need in found if need is not None]
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
        sources = self.sources(awaited, wait)
        begins = max(when for _, when in sources)
        seconds = min(link.seconds(awaited.nbytes), wait.end - begins)
        return Dependency(tuple(edge for edge, _ in sources), begins, seconds, awaited.nbytes, link)

    def sources(self, awaited: Event, wait: Event) -> list[tuple[Edge, float]]:
        """The starts of this event and of its peers that came before the wait was over, with their times."""
        events = [awaited, *(peer for peer in self.waits.peers(awaited) if peer.start <= wait.end)]
        return [((ref_of(event), False), event.start) for event in events]


def kind_of(event: Event) -> str:
    """The kind of transfer."""
    return event.name if event.kind == COLLECTIVE else MESSAGES
