"""What was sent: the bytes of our algorithms, beside what their closed forms say; the latency and the bandwidth that
transfers show; and what every wait needed before it could end, which a replay is made of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.auto import choose
from playground.algorithms.cost_model import ELEMENT, Counts, Task
from playground.algorithms.pipelined_ring import IN_FLIGHT
from playground.algorithms.ring import ring_cost
from playground.see.analyse.messages import CollectiveCall, match_collectives
from playground.see.analyse.timeline import BLOCKING, Edge, Ref, Timeline, ref_of
from playground.see.analyse.waits import Wait, Waits
from playground.see.record.recording import COLLECTIVE, RECEIVE, SEND, Event, Recording

FEW = IN_FLIGHT
"""Elements for each rank: with fewer, some piece of a chunk may have none."""
HALVES = ("reduce-scatter", "all-gather")
"""Our collectives that are one half of the ring."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What one collective of ours sent."""

    call: CollectiveCall
    nbytes: int
    """Of the whole tensor."""
    messages: tuple[int, ...]
    """Sent, by rank of the group."""
    sent: tuple[int, ...]
    """Bytes of these messages, by rank of the group."""
    expected: Counts
    """Messages and bytes of all ranks together."""

    @property
    def agrees(self) -> bool:
        """Whether as many messages and bytes were sent as the closed form says."""
        return (sum(self.messages), sum(self.sent)) == (self.expected.messages, self.expected.bytes)


def volumes(recording: Recording) -> list[Volume]:
    """Of every collective of ours that all its ranks went through, in the order in which they began.

    One without a closed form is left out: the hierarchical one where hosts have different numbers of ranks.
    """
    sent = sent_inside(recording)
    calls = [call for call in match_collectives(recording) if call.is_whole and is_ours(call, sent)]
    measured = ((call, expected_of(call, recording)) for call in calls)
    return [volume_of(call, expected, sent) for call, expected in measured if expected is not None]


def sent_inside(recording: Recording) -> dict[Ref, list[Event]]:
    """The messages of a rank, by the events that they lie in."""
    timeline, inside = Timeline(recording), dict[Ref, list[Event]]()
    for event in recording.events(SEND, RECEIVE):
        for outer in timeline.around(ref_of(event)):
            inside.setdefault(outer, []).append(event)
    return inside


def is_ours(call: CollectiveCall, messages: dict[Ref, list[Event]]) -> bool:
    """Whether it is made of messages that were recorded: the backend's are not."""
    name = algorithm_of(call)
    return (name in ALGORITHMS or name in HALVES) and any(ref_of(event) in messages for event in call.by_rank.values())


def algorithm_of(call: CollectiveCall) -> str:
    """The name of its algorithm in the table: of `all_reduce (binary_tree)` that is binary-tree."""
    return call.name.removeprefix("all_reduce (").removesuffix(")").replace("_", "-")


def volume_of(call: CollectiveCall, expected: Counts, inside: dict[Ref, list[Event]]) -> Volume:
    sends = [
        [event.nbytes for event in inside.get(ref_of(call.by_rank[rank]), []) if event.kind == SEND]
        for rank in call.group
    ]
    return Volume(
        call=call,
        nbytes=whole_bytes(call),
        messages=tuple(map(len, sends)),
        sent=tuple(map(sum, sends)),
        expected=expected,
    )


def expected_of(call: CollectiveCall, recording: Recording) -> Counts | None:
    """The closed form, for the ranks and the tensor of this call; None if there is none."""
    size, nbytes = len(call.group), whole_bytes(call)
    itemsize = nbytes // max(1, elements_of(call))
    few = elements_of(call) < FEW * size  # then some messages have no elements, and the number of elements counts
    ranks_per_host = ranks_per_host_of(call.group, recording)
    whole = elements_of(call) * ELEMENT if few else nbytes
    task = Task(size, whole, ranks_per_host or 1, recording.batches_messages)
    name = algorithm_of(call)
    if name in HALVES:
        counts = ring_cost(task).total.times(1 / 2)
    else:
        if ALGORITHMS[name].chooses:
            name = chosen_by_auto(call, recording)
        cost = ALGORITHMS[name].cost
        if cost is None or (ALGORITHMS[name].needs_hosts and ranks_per_host is None):
            return None
        counts = cost.load()(task).total
    return Counts(counts.messages, counts.bytes * itemsize / ELEMENT if few else counts.bytes)


def chosen_by_auto(call: CollectiveCall, recording: Recording) -> str:
    """The name of the algorithm that `auto` takes."""
    hosts = Counter(hosts_of(call.group, recording))
    code = choose(whole_bytes(call), len(call.group), len(hosts))
    return next(name for name, spec in ALGORITHMS.items() if spec.code.load() is code)


def hosts_of(group: Sequence[int], recording: Recording) -> list[str]:
    """Where these ranks ran."""
    hosts = {rank.rank: rank.host for rank in recording.ranks}
    return [hosts[rank] for rank in group]


def ranks_per_host_of(group: Sequence[int], recording: Recording) -> int | None:
    """How many ranks of the group every host has, the last one as many or fewer; None if that is not so."""
    hosts = hosts_of(group, recording)
    first = hosts.count(hosts[0])
    blocks = [hosts[begin : begin + first] for begin in range(0, len(hosts), first)]
    whole = all(len(set(block)) == 1 for block in blocks)
    return first if whole and len({block[0] for block in blocks}) == len(blocks) else None


def whole_bytes(call: CollectiveCall) -> int:
    """Of the tensor that all ranks hold together. What is recorded is what a rank gives: to an all-gather its share."""
    return shares(call) * max(event.nbytes for event in call.by_rank.values())


def elements_of(call: CollectiveCall) -> int:
    """Of the same tensor."""
    return shares(call) * max(prod(event.shape) for event in call.by_rank.values())


def shares(call: CollectiveCall) -> int:
    """How many times what a rank gives is the whole tensor."""
    return len(call.group) if algorithm_of(call) == "all-gather" else 1


SPREAD = 2
"""The largest transfers must have so many times the bytes of the smallest."""


@dataclass(frozen=True)
class Link:
    """A transfer of n bytes takes alpha + n * beta seconds."""

    alpha: float
    """The latency."""
    beta: float
    """Seconds per byte: the inverse of the bandwidth."""
    nbytes: int | None = None
    """Where all transfers were of about one size, what that was: then nobody can tell alpha from beta, and all is in
    alpha."""

    def seconds(self, nbytes: int) -> float:
        return self.alpha + nbytes * self.beta

    def change(self, latency: float, bandwidth: float, nbytes: int) -> float:
        """By how many seconds a transfer becomes shorter (or, negative, longer) with so many times the latency and the
        bandwidth.

        Where alpha is not to be told from beta, all is taken for whichever would make it shorter: so it is a bound.
        """
        if self.nbytes is not None:
            return self.alpha * max(1 - latency, 1 - 1 / bandwidth, key=abs)
        return self.alpha * (1 - latency) + nbytes * self.beta * (1 - 1 / bandwidth)


Transfer = tuple[int, float]
"""Bytes, and the seconds that they took."""


def fit_link(transfers: Sequence[Transfer]) -> Link:
    """alpha and beta, neither below 0, with the smallest relative errors over the sizes that were seen.

    Of each size the median counts: what else the machine does adds to some transfers and not to others.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in transfers:
        by_size[nbytes].append(seconds)
    points = [(nbytes, max(median(its), 1e-9)) for nbytes, its in sorted(by_size.items())]
    if not points:
        return Link(0.0, 0.0, nbytes=0)
    if points[-1][0] < SPREAD * max(1, points[0][0]):
        return Link(median(seconds for _, seconds in transfers), 0.0, nbytes=points[-1][0])
    return best([weighted_line(points), alpha_only(points), beta_only(points)], points)


def best(links: Sequence[Link], points: Sequence[Transfer]) -> Link:
    """Of those without anything below 0, the one with the smallest sum of squared relative errors."""
    allowed = [link for link in links if link.alpha >= 0 and link.beta >= 0]
    return min(allowed, key=lambda link: sum((link.seconds(nbytes) / seconds - 1) ** 2 for nbytes, seconds in points))


def weighted_line(points: Sequence[Transfer]) -> Link:
    """The line with the smallest squared relative errors: every point weighs 1 / seconds squared."""
    weights = [seconds**-2 for _, seconds in points]
    whole = sum(weights)
    mean_x = sum(weight * nbytes for weight, (nbytes, _) in zip(weights, points, strict=True)) / whole
    mean_y = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / whole
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    beta = above / below
    return Link(mean_y - beta * mean_x, beta)


def alpha_only(points: Sequence[Transfer]) -> Link:
    """The latency alone, as near to all as can be."""
    return Link(sum(1 / seconds for _, seconds in points) / sum(seconds**-2 for _, seconds in points), 0.0)


def beta_only(points: Sequence[Transfer]) -> Link:
    """The bandwidth alone, as near to all as can be."""
    return Link(0.0, sum(x / y for x, y in points) / sum((x / y) ** 2 for x, y in points))


MESSAGES = "messages"
"""Sends and receives, as a kind of transfer. Every collective of the backend is one, by its name."""


@dataclass(frozen=True)
class Dependency:
    """Something that a wait waited for."""

    sources: tuple[Edge, ...]
    """What has to have been before its transfer can begin."""
    begins: float
    """When the last of them was."""
    seconds: float
    """What the transfer took."""
    nbytes: int
    link: Link | None
    """None where what is waited for is another thread of the same rank."""


class Transfers:
    """All waits of a recording as dependencies."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self.links = self.fit()
        """By kind."""
        self.needs: dict[Ref, list[Dependency]] = {}
        """Of every wait."""
        self.overhead: dict[Ref, float] = {}
        """What a wait takes if everything is there."""
        for wait in waits.all:
            self.resolve(wait)

    def fit(self) -> dict[str, Link]:
        """The links that the transfers show which somebody waited for from their beginning; of a kind of which there
        are none, all."""
        sure: dict[str, list[Transfer]] = defaultdict(list)
        others: dict[str, list[Transfer]] = defaultdict(list)
        for wait in self.waits.all:
            if wait.awaited is not None and not self.waits.timeline.is_made_of_messages(wait.awaited):
                begins = max(when for _, when in self.sources(wait.awaited, wait.event))
                seconds = wait.event.end - begins
                (sure if wait.late > 0 else others)[kind_of(wait.awaited)].append((wait.awaited.nbytes, seconds))
        return {kind: fit_link(sure[kind] or others[kind]) for kind in sorted(sure.keys() | others.keys())}

    def resolve(self, wait: Wait) -> None:
        """Find what this wait needed. If nothing can have held it up, all of it is overhead."""
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
        """What `wait` needs of this. The transfer takes what the link says, unless that would be too long."""
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
        """The beginnings of this event and of its peers that came before the wait was over, and when they were."""
        events = [awaited, *(peer for peer in self.waits.peers(awaited) if peer.start <= wait.end)]
        return [((ref_of(event), False), event.start) for event in events]


def kind_of(event: Event) -> str:
    """Which transfers it is one of."""
    return event.name if event.kind == COLLECTIVE else MESSAGES
