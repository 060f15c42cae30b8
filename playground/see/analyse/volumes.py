"""Our algorithms in a recording: their messages and bytes beside their closed forms, and their time on more ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.auto import choose
from playground.algorithms.cost_model import ELEMENT, Counts, Machine, Task
from playground.algorithms.pipelined_ring import IN_FLIGHT
from playground.algorithms.ring import ring_cost
from playground.see.analyse import CollectiveCall, Ref, Timeline, match_collectives, ref_of
from playground.see.analyse.what_if import Link
from playground.see.record import COMPUTE, RECEIVE, SEND, Event, Recording

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
        is_ours = call.is_whole and algorithm_of(call) in (*ALGORITHMS, *HALVES)
        if is_ours and not inside.keys().isdisjoint(map(ref_of, call.by_rank.values())):
            its = (inside.get(ref_of(call.by_rank[rank]), []) for rank in call.group)
            sends = [[event.nbytes for event in messages if event.kind == SEND] for messages in its]
            counts = {"messages": tuple(map(len, sends)), "sent": tuple(map(sum, sends))}
            if (expected := expected_of(call, recording)) is not None:
                found.append(Volume(call=call, nbytes=whole(call)[0], expected=expected, **counts))
    return found


def algorithm_of(call: CollectiveCall) -> str:
    """The name of its algorithm in the table: binary-tree for `all_reduce (binary_tree)`."""
    return call.name.removeprefix("all_reduce (").removesuffix(")").replace("_", "-")


def expected_of(call: CollectiveCall, recording: Recording) -> Counts | None:
    """The closed form, for the ranks and the tensor of this call; None if there is none."""
    size, (nbytes, elements) = len(call.group), whole(call)
    few = elements < IN_FLIGHT * size  # then some pieces of chunks have no elements, and the number of elements counts
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


DOUBLINGS = 3
"""Number of times that the number of ranks is doubled."""


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
