"""What our algorithms sent, beside what their closed forms say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from playground.algorithms import ALGORITHMS
from playground.algorithms.auto import choose
from playground.algorithms.cost_model import ELEMENT, Counts, Task
from playground.algorithms.pipelined_ring import IN_FLIGHT
from playground.algorithms.ring import ring_cost
from playground.see.analyse.matching import CollectiveCall, match_collectives
from playground.see.analyse.timeline import Ref, Timeline, ref_of
from playground.see.record.recording import RECEIVE, SEND, Event, Recording

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
        call=call, nbytes=whole_bytes(call), messages=tuple(map(len, sends)), sent=tuple(map(sum, sends)),
        expected=expected,
    )  # fmt: skip


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
