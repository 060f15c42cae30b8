"""What ranks have called differently, whether or not anything stood still: the first place at which
their calls do not match.

A backend joins the collectives of a group by their place in the order of calls and by nothing else:
the fifth call of one rank meets the fifth call of every other rank, whatever function it is. What
DistributedDataParallel does in C++ has its place among the calls of the program.

Source: ProcessGroupGloo's nextTag() and ProcessGroupNCCL's seqCollective_ (torch 2.15)
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from playground.base.ranks import name_ranks
from playground.base.wrapping import wrap_sentence
from playground.explain.hang.states import (
    BACKWARD,
    BUCKETS,
    BUFFERS,
    COLLECTIVE,
    MAKE_DDP,
    OF_DDP,
    RECEIVE,
    SEND,
    Channel,
    Doing,
    Kind,
    Operation,
    RankState,
)
from playground.explain.hang.steps import explain_counts
from playground.explain.hang.wait_graph import (
    WaitGraph,
    find_difference,
    find_minority,
    is_at,
    leave_out_renumbered,
    list_known,
)
from playground.explain.hang.wording import (
    HAS_NOT,
    MOST_PARTIES,
    UNLIKE,
    Diagnosis,
    Predicate,
    compose,
    detail,
    draw_table,
    has_called,
    join_parties,
    name_caller,
    shorten,
)

ORDERED = COLLECTIVE, MAKE_DDP, BUFFERS, BUCKETS, BACKWARD
"""The channels whose calls a group counts together. The other collectives meet in the store."""
OF_ONE_NAME = Kind.SHAPES, Kind.DTYPES, Kind.ROOTS, Kind.OPS
"""The differences between two calls of the same function."""
UNSHARED_CALL = (
    "{ranks} {call} {name} ({place}), {others} {do} not: is it under a condition on the rank?"
    "{more} If not, {otherwise}"
)
"""The cure where a call from a line that the others have not called from meets another call."""
LISTS = ", and to broadcast_object_list lists of the same length"
"""What is added where calls may be its."""
UNEQUAL_STEPS = "have ranks unequal numbers of batches, or does one leave the loop early?"
MOST_EXTRA = 64
"""Largest number of calls of one rank that are looked for among those of another."""
Group = tuple[tuple[int, ...], int]
"""The ranks of a group, and its number."""
Calls = Mapping[int, Operation]
"""The calls of a rank on a group, by their place. The earliest may be missing."""


@dataclass(frozen=True, slots=True)
class Extra:
    """Calls that some ranks have made where others go on without them."""

    calls: tuple[Operation, ...]
    """At least one, in their order."""
    callers: frozenset[int]
    others: frozenset[int]
    evidence: int
    """Number of later calls that are the same without them."""

    @property
    def weight(self) -> tuple[int, int]:
        """The less, the better it explains a difference."""
        return len(self.calls), -self.evidence


def group_of(channel: Channel) -> Group:
    return channel.group, channel.number


def order_calls(state: RankState) -> dict[Group, dict[int, Operation]]:
    """The collectives that a rank has called on each group, by their place: 0 is the first."""
    known = [one for one in state.operations if one.channel.kind in ORDERED]
    called = {channel: count for channel, count in state.counts.items() if channel.kind in ORDERED}
    called |= {one.channel: one.index for one in reversed(known)}  # before the first that is known
    places = Counter[Group]()
    for channel, count in called.items():
        places[group_of(channel)] += count
    orders: dict[Group, dict[int, Operation]] = {}
    for one in known:
        group = group_of(one.channel)
        orders.setdefault(group, {})[places[group]] = one
        places[group] += 1
    return orders


def find_extra(
    orders: Mapping[int, Calls], callers: Collection[int], others: Collection[int], place: int
) -> Extra | None:
    """The fewest calls of the `callers` without which their calls are the same as those of the
    `others`, from a place at or before this one, where both differ. None if there are none, or
    if no later call bears it out."""
    mine, theirs = orders[min(callers)], orders[min(others)]
    first = max(min(mine, default=0), min(theirs, default=0), place - MOST_EXTRA)
    starts = [
        at for at in range(first, place + 1)
        if at in mine and at in theirs and not is_same(mine[at], theirs[at])
    ]  # fmt: skip
    for number in range(1, MOST_EXTRA):
        for start in starts:
            later = [at for at in theirs if at >= start and at + number in mine]
            if later and all(is_same(mine[at + number], theirs[at]) for at in later):
                calls = tuple(mine[at] for at in range(start, start + number))
                return Extra(calls, frozenset(callers), frozenset(others), len(later))
    return None


def is_same(one: Operation, other: Operation) -> bool:
    """Whether both are the same call in the same line."""
    return (one.name, one.tag, one.peer, one.line) == (
        other.name, other.tag, other.peer, other.line,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which ranks have called what does not match."""

    kind: Kind
    met: Mapping[int, Operation]
    """The call of each rank there, of those whose call is known."""
    culprits: frozenset[int]
    """The ranks that differ from most; all if there is no majority."""
    extra: Extra | None = None
    """The calls that some have made there and others have not, if both go on alike."""

    def list_parties(self) -> list[tuple[list[int], Predicate]]:
        """Ranks and their calls: those of a culprit, and those of another rank."""
        if extra := self.extra:
            more = f" and {len(extra.calls) - 1} more" if len(extra.calls) > 1 else ""
            called = has_called(extra.calls[0], self.kind, more)
            return [(sorted(extra.callers), called), (sorted(extra.others), HAS_NOT)]
        acts = {one: has_called(self.met[one], self.kind) for one in sorted(self.met)}
        other = min(self.culprits)
        rank = next(
            one for one in acts if find_difference(self.met[one], self.met[other], strictly=True)
        )
        told = dict.fromkeys((acts[other], acts[rank]))
        if self.kind in UNLIKE:
            told |= dict.fromkeys(acts.values())
        return [([one for one in acts if acts[one] == act], act) for act in [*told][:MOST_PARTIES]]

    def say(self) -> str:
        return join_parties(self.list_parties(), ", which " if self.extra else " where ")


def note_difference(found: Diagnosis, states: Sequence[RankState]) -> Diagnosis:
    """The diagnosis, with the first difference between the calls of ranks if there is one that
    they have passed."""
    first = find_first_difference(states)
    if first is None:
        return note_surplus(found, states)
    waits = {state.rank: state.waits_for for state in states}
    there = {
        rank
        for rank, one in first.met.items()
        if (now := waits[rank]) and is_at(now, one.channel, one.index)
    }
    others = first.met.keys() - first.culprits
    is_same = first.kind == found.kind and bool(there)
    has_met = first.culprits <= there and (others & there or not others)
    if (is_same or has_met) and not first.extra:
        return found
    cure = find_cure(first.kind, first.met, states)
    return replace(found, difference=first.say(), cure=cure)


def note_surplus(found: Diagnosis, states: Sequence[RankState]) -> Diagnosis:
    """The diagnosis, with the calls that ranks have made in addition, if their lines tell them."""
    surplus = find_surplus(states)
    return replace(found, difference=surplus.say(), cure=surplus.kind.cure) if surplus else found


def find_mismatch(states: Sequence[RankState]) -> Diagnosis | None:
    """The first operation that ranks called differently, although it may have worked; None if none
    is known."""
    states = leave_out_renumbered(states)
    if told := find_strays(states):
        return told
    first = find_first_difference(states)
    if first is None:
        return None
    rows = {rank: (detail(one, first.kind), one.line, "") for rank, one in first.met.items()}
    return compose_difference(first, states, draw_table(dict(sorted(rows.items())), {}))


def find_strays(states: Sequence[RankState]) -> Diagnosis | None:
    """Messages to ranks that do not exist; None if there are none."""
    strays = {
        state.rank: one
        for state in states
        if not state.unnamed
        for one in list_known(state)
        if one.stranger is not None
    }
    if not strays:
        return None
    first = min(strays)
    told = [([first], has_called(strays[first], Kind.STRANGER))]
    rows = {one: (detail(strays[one], Kind.ROOTS), strays[one].line, "") for one in strays}
    return compose(Kind.STRANGER, strays, told, draw_table(rows, {}), None)


def compose_difference(first: Difference, states: Iterable[RankState], table: str) -> Diagnosis:
    culprits, parties = first.culprits, first.list_parties()
    told = compose(first.kind, culprits, parties, table, None)
    cure = find_cure(first.kind, first.met, states)
    return replace(told, sentence=wrap_sentence(first.say()), cure=cure)


def find_cure(kind: Kind, met: Mapping[int, Operation], states: Iterable[RankState]) -> str:
    """The cure. Where different calls meet, and one is from a line that the other ranks have never
    called from, it may be under a condition; if they have, it has come too early. Of several such
    calls, the program comes to the first one first. So may one call that meets another one of the
    same name."""
    if kind == Kind.SHAPES and all(map(may_be_lengths, met.values())):
        return f"{kind.cure}{LISTS}"
    if kind not in (Kind.BESIDE_DDP, Kind.COLLECTIVES, *OF_ONE_NAME):
        return kind.cure
    known = {state.rank: state for state in states if state.rank in met}
    by_counts = explain_counts(known.values()) if kind == Kind.BESIDE_DDP else ""
    unshared = find_unshared_calls(met, known)
    if by_counts or not unshared or (kind in OF_ONE_NAME and len(unshared) > 1):
        return by_counts or kind.cure
    paths = {rank: find_path(met[rank], known[rank]) for rank in known}
    callers = unshared[0]
    for each in unshared[1:]:
        if met[each[0]].name == BUCKETS:
            continue  # the second forward pass: the others have come to its line before
        if comes_before(paths[each[0]], paths[callers[0]]):
            callers = each
        elif kind == Kind.COLLECTIVES and not find_fork(paths[each[0]], paths[callers[0]]):
            return kind.cure  # nothing tells which of them the others have left out
    others = sorted(known.keys() - {*callers})
    is_early = kind == Kind.BESIDE_DDP or len(unshared) == 1
    return UNSHARED_CALL.format(
        ranks=name_ranks(callers), call="call" if callers[1:] else "calls",
        name=known[callers[0]].find_caller(met[callers[0]]) or met[callers[0]].name,
        place=describe_place(paths[callers[0]], paths[others[0]]),
        others=name_ranks(others), do="do" if others[1:] else "does",
        more=ask_for_group(met[callers[0]], callers, known),
        otherwise=UNEQUAL_STEPS if is_early else Kind.COLLECTIVES.cure,
    )  # fmt: skip


def may_be_lengths(call: Operation) -> bool:
    """Whether it may be what broadcast_object_list sends first: how long each object is."""
    return (call.name, call.dtype, len(call.shape)) == ("broadcast", "int64", 1)


def ask_for_group(call: Operation, callers: Sequence[int], known: Mapping[int, RankState]) -> str:
    """A question, where ranks call a collective of the default group that others do not, and have a
    smaller group in common."""
    for channel in known[callers[0]].counts if call.number == 0 else ():
        if channel.number and {*callers} <= {*channel.group} < {*call.group}:
            group = f"the group of {name_ranks(sorted(channel.group))}"
            return f" Or is group= left out, for {group}?"
    return ""


def find_unshared_calls(
    met: Mapping[int, Operation], known: Mapping[int, RankState]
) -> list[list[int]]:
    """The ranks of each call from a line that the others have not called from: calls of the program
    before those of DDP, then those of fewer ranks first."""
    calls: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(known):
        calls.setdefault((met[rank].name, met[rank].line), []).append(rank)
    found = [
        (name in OF_DDP, len(callers), callers)
        for (name, line), callers in calls.items()
        if line
        and len(calls) > 1
        and not any(
            one.line == line
            for rank, state in known.items()
            if rank not in callers
            for one in state.operations
        )
    ]
    return [callers for _, _, callers in sorted(found)]


def find_path(call: Operation, state: RankState) -> list[str]:
    """The program's lines that lead to a call, the outermost first: its own at least."""
    names = [os.path.basename(line) for line in (call.line, *state.stack[:1])]
    is_there = len({*names}) == 1 and len(names) > 1
    return [*state.stack[::-1]] if is_there else [call.line]


def find_fork(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Where two paths lead apart, if that is in the same function."""
    lines = next((pair for pair in zip(one, other, strict=False) if len({*pair}) > 1), None)
    functions = {re.sub(r":\d+ in ", " in ", os.path.basename(line)) for line in lines or ()}
    return lines if len(functions) == 1 and " in " in functions.pop() else None


def comes_before(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether a path leads to an earlier line of the function in which another goes on."""
    fork = find_fork(one, other)
    numbers = [int(line.partition(" in ")[0].rpartition(":")[2]) for line in fork or ()]
    return bool(numbers) and numbers[0] < numbers[1]


def describe_place(path: Sequence[str], other: Sequence[str]) -> str:
    """The line of a call, and that by which its path leads apart from another: "eval.py:39, called
    in main :71"."""
    place = shorten(path[-1].partition(" in ")[0], 24)
    fork = find_fork(path, other)
    if fork is None or fork[0] == path[-1]:
        return place
    return name_caller(place, fork[0])


def find_first_difference(states: Iterable[RankState]) -> Difference | None:
    """The earliest of the operations that ranks have called differently."""
    graph = WaitGraph(state for state in states if not state.unnamed)
    orders = {rank: order_calls(state) for rank, state in graph.states.items()}
    placed = list_placed(orders)
    found = [
        (min(one.issued for one in met.values()), met, at)
        for at, met in [*placed.items(), *((None, met) for met in list_met(graph))]
    ]
    for _, met, at in sorted(found, key=lambda each: each[0]):
        some = next(iter(met))
        if any(find_difference(met[some], one, strictly=True) for one in met.values()):
            culprits = find_minority(met, strictly=True)
            other = min(culprits)
            kinds = (find_difference(one, met[other], strictly=True) for one in met.values())
            first = Difference(next(filter(None, kinds)), met, frozenset(culprits))
            if at is None:
                return first
            group, place = at
            return look_for_extra(first, {rank: orders[rank][group] for rank in met}, place)
    return None


def list_placed(
    orders: Mapping[int, Mapping[Group, Calls]],
) -> dict[tuple[Group, int], dict[int, Operation]]:
    """The calls that meet by their place among those of their group, by rank."""
    placed: dict[tuple[Group, int], dict[int, Operation]] = {}
    for rank, groups in orders.items():
        for group, calls in groups.items():
            for place, one in calls.items():
                placed.setdefault((group, place), {})[rank] = one
    return placed


def list_met(graph: WaitGraph) -> Iterable[dict[int, Operation]]:
    """The calls that meet in another way, by rank: messages, and collectives that meet in the
    store."""
    meetings: dict[tuple[object, ...], dict[int, Operation]] = {}
    for rank, state in graph.states.items():
        for one in list_known(state):
            key: tuple[object, ...] = one.channel, one.index
            if one.kind != COLLECTIVE:
                sender, receiver = (rank, one.peer) if one.kind == SEND else (one.peer, rank)
                if graph.count(receiver, Channel(RECEIVE, one.group, None, one.tag, one.number)):
                    continue  # a receive from anyone may have got any of them
                key = sender, receiver, one.group, one.tag, one.number, one.index
            elif one.channel.kind in ORDERED:
                continue
            meetings.setdefault(key, {})[rank] = one
    return meetings.values()


def find_surplus(states: Iterable[RankState]) -> Difference | None:
    """Calls that ranks which wait have made in addition to those of ranks that have finished. Each
    of them met a later call of the same kind there, so only their lines tell them."""
    graph = WaitGraph(state for state in states if not state.unnamed)
    orders = {rank: order_calls(state) for rank, state in graph.states.items()}
    for rank, one in graph.waits.items():
        group = group_of(one.operation.channel)
        mine = orders[rank].get(group, {})
        for other in sorted(graph.find_doing(Doing.FINISHED)):
            theirs = orders[other].get(group, {})
            common = sorted(mine.keys() & theirs.keys())
            differ = [at for at in common if not is_same(mine[at], theirs[at])]
            calls = {rank: mine, other: theirs}
            if differ and (extra := find_extra(calls, {rank}, {other}, differ[0])):
                met = {each: orders[each].get(group, {}).get(differ[0]) for each in graph.states}
                callers, others = (
                    frozenset(one for one, call in met.items() if call and is_same(call, its))
                    for its in (mine[differ[0]], theirs[differ[0]])
                )
                extra = replace(extra, callers=callers, others=others)
                return Difference(kind_of(extra), {}, callers, extra)
    return None


def look_for_extra(first: Difference, calls: Mapping[int, Calls], place: int) -> Difference:
    """The difference as calls that some ranks have made in addition, if it is one."""
    other = first.met[min(first.culprits)]
    some = {rank for rank, one in first.met.items() if not find_difference(one, other)}
    rest = first.met.keys() - some
    ways = [(some, rest), (rest, some)] if some and rest else []
    found = [find_extra(calls, callers, others, place) for callers, others in ways]
    extra = min(filter(None, found), key=lambda each: each.weight, default=None)
    if extra is None:
        return first
    return replace(first, kind=kind_of(extra), extra=extra)


def kind_of(extra: Extra) -> Kind:
    names = {one.name for one in extra.calls}
    if names == {BUFFERS} and len(extra.callers) <= len(extra.others):
        return Kind.ALONE
    return Kind.SKIPPED if names <= {*OF_DDP} else Kind.ABSENT
