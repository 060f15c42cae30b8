"""Why ranks stand still, in words: a deadlock is proved from what they have called, without any
timeout; otherwise the last to come is named. And what ranks called differently although nothing
stood still.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from playground.explain.hang import (
    BUFFERS,
    COLLECTIVE,
    FORM_WORLD,
    ISSUED,
    NEW_GROUP,
    OF_DDP,
    RECEIVE,
    REDUCTIONS,
    SEND,
    Channel,
    Doing,
    Kind,
    Operation,
    RankState,
)
from playground.explain.hang.sequences import (
    ORDERED,
    Calls,
    Extra,
    Group,
    find_extra,
    group_of,
    is_same,
    order_calls,
)
from playground.explain.hang.streams import stand_in_streams
from playground.explain.hang.wait_graph import (
    TO_ROOT,
    Dependency,
    WaitGraph,
    find_difference,
    find_minority,
    is_at,
    leave_out_renumbered,
    list_known,
    tell_apart,
)

ACTS = {
    Doing.FINISHED: ("has finished", "have finished"),
    Doing.STOPPED: ("is stopped", "are stopped"),
    Doing.IN_PROGRAM: ("is in the program", "are in the program"),
    Doing.NOT_SEEN: ("is not seen", "are not seen"),
}
"""The verbs for one rank that is in no operation, and for several."""
LATE = {
    Doing.DEAD: Kind.LOST,
    Doing.STOPPED: Kind.SUSPENDED,
    Doing.IN_PROGRAM: Kind.STRAGGLER,
    Doing.NOT_SEEN: Kind.UNSEEN,
}
"""The kind of the diagnosis if others wait for such a rank."""
ABORT = "SIGABRT"
"""In the words on a rank's end: by a backend that has got what it did not expect, most likely."""
JOINS = "whether other processes join that world"
WIDTH, WIDTHS = 80, (12, 26, 7, 17, 10)
"""Columns: of a text, and the most of each cell of a table if there is no room for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why ranks wait, or what they called differently."""

    kind: Kind
    culprits: tuple[int, ...]
    """Ranks, ascending: several where nothing tells which of them is wrong."""
    operation: str
    """That a culprit is in, or, if it is in none, that the others wait in."""
    line: str
    """Where a culprit is, if known."""
    proved: bool
    """Whether ranks wait that cannot be released any more, whatever the others do."""
    unknown: str
    """The facts that a proof lacks, if it is probably a deadlock."""
    sentence: str
    table: str
    """The states of ranks: one row per rank, or for several that do the same."""
    cure: str
    waits: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Ranks that wait, each with the ranks that it waits for."""
    difference: str = ""
    """Where the calls of ranks first differ, if that is not what the sentence says."""

    def __str__(self) -> str:
        first = [textwrap.fill(f"before that: {self.difference}", WIDTH)] if self.difference else []
        unknown = [textwrap.fill(f"not known: {self.unknown}", WIDTH)] if self.unknown else []
        return "\n".join((self.sentence, *first, self.table, *unknown, self.cure))


@dataclass(frozen=True, slots=True)
class Predicate:
    """A verb with its object, for one rank."""

    one: str
    """Said of one rank: "is in barrier"."""
    several: str
    line: str
    operation: str = ""
    is_over: bool = False

    def say(self, ranks: Sequence[int], before: str = "") -> str:
        """The sentence about these ranks. A line in the same file as the line `before` is told
        without the file."""
        place = shorten(self.line.partition(" in ")[0], 24)
        file, _, number = place.rpartition(":")
        place = f":{number}" if file and before.startswith(f"{file}:") else place
        who = shorten(format_ranks(ranks), 16)
        sentence = f"ranks {who} {self.several}" if len(ranks) > 1 else f"rank {who} {self.one}"
        return f"{sentence} ({place})" if place else sentence


HAS_NOT = Predicate("has not", "have not", "")


def has_called(operation: Operation, kind: Kind, more: str = "") -> Predicate:
    what = detail(operation, kind) + more
    return Predicate(
        f"has called {what}", f"have called {what}", operation.line, operation.name, is_over=True
    )


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
        return [
            ([one for one in acts if acts[one] == acts[some]], acts[some]) for some in (other, rank)
        ]

    def say(self) -> str:
        (ranks, called), (others, act) = self.list_parties()
        between = ", which " if self.extra else " where "
        return between.join((called.say(ranks), act.say(others, called.line)))


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """Who waits for whom, and why; None if no rank waits in an operation, is stopped or dead. Only
    states of the same moment prove a deadlock: states between which no rank has moved."""
    states = stand_in_streams(leave_out_renumbered(states))
    found = find_cause(states)
    return found and (find_unlaunched(found, states) or note_difference(found, states))


def explain_failure(states: Sequence[RankState]) -> Diagnosis | None:
    """Why the operation failed that a dead rank was in: what ranks have called differently, or who
    did not come. None if no dead rank was in an operation, or nothing tells why."""
    states = leave_out_renumbered(states)
    was = stand_in_streams(
        [
            replace(state, doing=Doing.IN_OPERATION)
            if state.doing == Doing.DEAD and state.waits_for
            else state
            for state in states
        ]
    )
    graph = WaitGraph(was)
    dead = {state.rank for state in states if state.doing == Doing.DEAD}
    if told := find_strays(was):
        return told
    if first := find_first_difference(was):
        return compose_difference(first, draw_last(graph))
    found = find_cause(was, is_over=True)
    if found is None or found.kind == Kind.LOST:  # which its failure says itself
        return None
    if found.kind != Kind.RUNNING:
        return note_surplus(found, was)
    aborted = {rank for rank in dead & graph.waits.keys() if ABORT in graph.states[rank].end}
    if not aborted:
        return None
    others = min(graph.waits.keys() - aborted, default=None)
    told = describe(graph, Kind.ABORTED, aborted, min(aborted), others)
    return replace(told, table=draw_last(graph))


def draw_last(graph: WaitGraph) -> str:
    """The table of what each rank has called last, which it may not have come out of."""
    rows = {}
    for rank, state in sorted(graph.states.items()):
        rows[rank] = list_cells(graph, rank)
        last = next((one for one in reversed(state.operations) if not one.raised), None)
        if last and rank not in graph.waits and state.doing != Doing.FINISHED:
            rows[rank] = f"{detail(last, Kind.ROOTS)} #{last.index}", last.line, ""
    return draw_table(rows, {})


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
    if first.culprits <= there and (others & there or not others) and not first.extra:
        return found
    return replace(found, difference=first.say(), cure=first.kind.cure)


def find_unlaunched(found: Diagnosis, states: Sequence[RankState]) -> Diagnosis | None:
    """The diagnosis, if ranks wait for an operation in a batch that has no end."""
    waits = [state.waits_for for state in states if state.doing == Doing.IN_OPERATION]
    for state in states:
        for one in state.unlaunched:
            if any(each and is_at(each, one.channel, one.index) for each in waits):
                act = has_called(one, Kind.OPEN, " in a batch that has no end")
                return replace(
                    found,
                    kind=Kind.OPEN,
                    difference=act.say([state.rank]),
                    cure=Kind.OPEN.cure,
                )
    return None


def note_surplus(found: Diagnosis, states: Sequence[RankState]) -> Diagnosis:
    """The diagnosis, with the calls that ranks have made in addition, if their lines tell them."""
    surplus = find_surplus(states)
    return replace(found, difference=surplus.say(), cure=surplus.kind.cure) if surplus else found


def find_cause(states: Sequence[RankState], is_over: bool = False) -> Diagnosis | None:
    """As `diagnose`, without the first difference. If it `is_over`, an operation has failed, and
    nobody waits any more."""
    graph = WaitGraph(states)
    idle = WaitGraph([replace(state, may_act="", unnamed="") for state in states])
    if firm := graph.find_blocked(find_firm(graph), set()):
        blocked = firm | {
            rank for rank in idle.find_blocked(idle.waits, set()) if idle.waits[rank].missing & firm
        }
        return explain(idle, blocked, blocked, None if is_over else "")
    for judge in (idle, WaitGraph(idle.states.values(), pessimistic=True)):
        if blocked := judge.find_blocked(judge.waits, set()):
            unknown = None if is_over else list_unknown(graph, blocked)
            return explain(judge, judge.waits, blocked, unknown)
    return find_unformed(graph) or find_late(graph)


def find_unformed(graph: WaitGraph) -> Diagnosis | None:
    """Ranks that form a world of more ranks than there are, if only those are missing."""
    missing = graph.find_doing(Doing.NOT_SEEN)
    forming = {
        rank: wait.operation
        for rank, wait in sorted(graph.waits.items())
        if wait.operation.is_elsewhere and wait.missing and wait.missing <= missing
    }
    for rank, one in forming.items():
        alike = [other for other in forming if forming[other].channel == one.channel]
        absent, there = graph.waits[rank].missing, len(graph.states.keys() - missing)
        whom = f"rank{'s' if len(absent) > 1 else ''} {format_ranks(absent)} of {len(one.group)}"
        what = f"in {one.name}, which waits for {whom}: there are {there}"
        act = Predicate(f"is {what}", f"are {what}", one.line, one.name)
        return compose(Kind.TOO_FEW, alike, [(alike, act)], draw_states(graph), None)
    return None


def draw_states(graph: WaitGraph) -> str:
    """A table of the states of all ranks that are seen."""
    seen = sorted(graph.states.keys() - graph.find_doing(Doing.NOT_SEEN))
    rows = {one: list_cells(graph, one) for one in seen}
    return draw_table(rows, {one: graph.states[one].since for one in seen})


def find_firm(graph: WaitGraph) -> list[int]:
    """The ranks that can only wait: all their calls have names, no other thread of theirs may act,
    their operation does not give up, and no data is under way between those that take part in
    it."""
    moving = {
        rank for rank, state in graph.states.items() if state.moves or state.doing == Doing.STOPPED
    }
    unknown = {rank for rank, state in graph.states.items() if state.may_act or state.unnamed}
    waits = ((rank, wait) for rank, wait in graph.waits.items() if rank not in unknown)
    return [
        rank
        for rank, wait in waits
        if not (wait.operation.may_give_up or wait.operation.is_elsewhere or moving & wait.parties)
    ]


def list_unknown(graph: WaitGraph, blocked: set[int]) -> str:
    """The unknowns of these ranks, and of those that they wait for."""
    waits, unknown = [graph.waits[rank] for rank in blocked], dict[str, set[int]]()
    for rank in {*blocked}.union(*(wait.parties for wait in waits)):
        state = graph.states[rank]
        reasons = (
            (state.unnamed, True),
            (state.may_act, rank in blocked or state.doing == Doing.FINISHED),
            ("whether data is under way", state.moves),
            (JOINS, rank in blocked and graph.waits[rank].operation.is_elsewhere),
            ("whether it gives up", rank in blocked and graph.waits[rank].operation.may_give_up),
        )
        for reason in (reason for reason, holds in reasons if holds and reason):
            unknown.setdefault(reason, set()).add(rank)
    told = (
        f"{why} (rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)})"
        for why, ranks in unknown.items()
    )
    return ", ".join(told) or "which ranks the operations still need"


def tell(states: Sequence[RankState]) -> str:
    """The diagnosis or, if no rank waits, what each does."""
    rows = {state.rank: (state.end or state.doing, state.line, "") for state in states}
    since = {state.rank: state.since for state in states}
    return str(diagnose(states) or f"no rank waits\n{draw_table(rows, since)}")


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
    return compose_difference(first, draw_table(dict(sorted(rows.items())), {}))


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


def compose_difference(first: Difference, table: str) -> Diagnosis:
    culprits, parties = first.culprits, first.list_parties()
    told = compose(first.kind, culprits, parties, table, None)
    return replace(told, sentence=textwrap.fill(first.say(), WIDTH))


def find_first_difference(states: Iterable[RankState]) -> Difference | None:
    """The earliest of the operations that ranks have called differently."""
    graph = WaitGraph(state for state in states if not state.unnamed)
    orders = {rank: order_calls(state) for rank, state in graph.states.items()}
    placed: dict[tuple[Group, int], dict[int, Operation]] = {}
    meetings: dict[tuple[object, ...], dict[int, Operation]] = {}
    for rank, state in graph.states.items():
        for group, calls in orders[rank].items():
            for place, one in calls.items():
                placed.setdefault((group, place), {})[rank] = one
        for one in list_known(state):
            key: tuple[object, ...] = one.channel, one.index
            if one.kind != COLLECTIVE:
                sender, receiver = (rank, one.peer) if one.kind == SEND else (one.peer, rank)
                if graph.count(receiver, (RECEIVE, one.group, None, one.tag, one.number)):
                    continue  # a receive from anyone may have got any of them
                key = sender, receiver, one.group, one.tag, one.number, one.index
            elif one.channel[0] in ORDERED:
                continue
            meetings.setdefault(key, {})[rank] = one
    found = [
        (min(one.issued for one in met.values()), met, at)
        for at, met in [*placed.items(), *((None, met) for met in meetings.values())]
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
            return look_for_extra(first, {rank: orders[rank][at[0]] for rank in met}, at[1])
    return None


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


def explain(
    graph: WaitGraph, held: Iterable[int], blocked: set[int], unknown: str | None
) -> Diagnosis:
    """Why these ranks are blocked: for ever, if nothing is unknown; until they failed, if that is
    None."""
    culprits = graph.find_culprits(held, blocked)
    waits = graph.waits
    if any(waits[rank].never_ends for rank in culprits & blocked):
        return describe(graph, Kind.STRANGER, culprits, min(culprits), unknown=unknown)
    stuck = blocked | graph.finished
    edges = [
        (rank, other)
        for rank in blocked
        for other in waits[rank].absent & stuck | waits[rank].differing
    ]
    kinds = {edge: classify(graph, *edge, culprits) for edge in edges if culprits & {*edge}}
    # what they do to each other, and to ranks that expect something else of them
    if len(culprits) > 1:
        kinds = {
            edge: kind
            for edge, kind in kinds.items()
            if culprits >= {*edge} or kind in (Kind.WRONG_PEER, Kind.GROUPS)
        } or kinds
    first = min(kinds.values(), key=[*Kind].index)
    waiting = Counter(other for _, other in edges)
    told = [edge for edge in kinds if kinds[edge] == first]
    rank, other = min(
        told, key=lambda edge: (edge[1] not in culprits, -waiting[edge[1]], edge[::-1])
    )
    return describe(graph, first, culprits, other, rank, unknown)


def classify(graph: WaitGraph, rank: int, other: int, culprits: set[int]) -> Kind:
    """Why one rank waits for another."""
    mine = graph.waits[rank].operation
    theirs = graph.waits[other].operation if other in graph.waits else None
    if {rank, other} & graph.find_failing() & culprits:
        return Kind.IN_FINALLY
    if other in graph.waits[rank].differing and (
        difference := find_difference(mine, graph.find_part(rank, mine, other))
    ):
        return difference
    if mine.kind != COLLECTIVE and (stray := find_stray(graph, rank, other, mine)):
        return stray
    if theirs and mine.name == theirs.name == FORM_WORLD:
        return Kind.STORES
    if NEW_GROUP in (mine.name, theirs and theirs.name):
        return Kind.PARTIAL_GROUP
    if theirs is None:
        return Kind.UNFORMED if mine.name == FORM_WORLD else Kind.ENDED
    same = (mine.group, mine.number) == (theirs.group, theirs.number)
    if mine.kind == theirs.kind == COLLECTIVE:
        if same:
            return tell_apart(mine, theirs) if mine.channel != theirs.channel else Kind.CIRCLE
        return Kind.GROUPS if mine.name == theirs.name else Kind.ABSENT
    if COLLECTIVE in (mine.kind, theirs.kind):
        return Kind.ABSENT
    if mine.kind != theirs.kind:
        if same and mine.tag == theirs.tag:
            return Kind.WRONG_PEER
        return Kind.WRONG_TAG if theirs.peer in (rank, None) and same else Kind.CIRCLE
    kinds = {graph.waits[one].operation.kind if one in graph.waits else "" for one in culprits}
    if len(kinds) > 1:
        return Kind.CIRCLE
    return Kind.SENDS if mine.kind == SEND else Kind.RECEIVES


def find_stray(graph: WaitGraph, rank: int, other: int, message: Operation) -> Kind | None:
    """The kind of difference from an unmatched message between the same ranks, if there is one."""
    kind = RECEIVE if message.kind == SEND else SEND
    for channel, count in graph.states[other].counts.items():
        _, group, peer, tag, number = channel
        same = (group, number) == (message.group, message.number)
        if channel[0] == kind and peer == rank and same != (tag == message.tag):
            anyone: list[Channel] = [(RECEIVE, group, None, tag, number)] if kind == SEND else []
            if count > graph.count(rank, (message.kind, group, other, tag, number), *anyone):
                return Kind.WRONG_TAG if same else Kind.GROUPS
    return None


def find_late(graph: WaitGraph) -> Diagnosis | None:
    """Who comes last, if nobody is blocked."""
    awaited = set[int]().union(*(wait.missing for wait in graph.waits.values()))
    for doing, kind in LATE.items():
        must_be_awaited = doing in (Doing.IN_PROGRAM, Doing.NOT_SEEN)
        late = graph.find_doing(doing) & (awaited if must_be_awaited else graph.states.keys())
        if late:
            other = min(late, key=lambda rank: (-graph.states[rank].since, rank))
            waiting = [
                rank for rank, wait in graph.waits.items() if other in wait.missing
            ] or graph.waits
            return describe(graph, kind, late, other, min(waiting, default=None))
    if graph.waits and (lost := find_unwaited(graph)):
        return lost
    return describe(graph, Kind.RUNNING, set(), min(graph.waits)) if graph.waits else None


def find_unwaited(graph: WaitGraph) -> Diagnosis | None:
    """A receive whose message has been sent by an isend that its rank has not waited for: where the
    program keeps no `Work`, the message may never be sent."""
    for rank, wait in sorted(graph.waits.items()):
        mine = wait.operation
        if mine.kind != RECEIVE or mine.peer not in graph.states:
            continue
        channel = SEND, mine.group, rank, mine.tag, mine.number
        known = list_known(graph.states[mine.peer])
        sent = next((one for one in known if is_at(one, channel, mine.index)), None)
        if sent and sent.state == ISSUED:
            act = has_called(sent, Kind.UNWAITED)
            waits = find_act(graph, rank, Kind.UNWAITED, None)
            parties = [([mine.peer], act), ([rank], waits)]
            return compose(Kind.UNWAITED, {mine.peer}, parties, draw_states(graph), None)
    return None


UNANSWERED = "have rank {other} take part in this message, or rank {rank} leave it out"
"""The cure where a rank waits for a message with one that has finished."""


def describe(
    graph: WaitGraph,
    kind: Kind,
    culprits: set[int],
    other: int,
    rank: int | None = None,
    unknown: str | None = None,
) -> Diagnosis:
    """`rank` waits for `other`, which is the culprit or one of them."""
    waits, pairs = graph.waits, ((rank, other), (other, rank))
    differing = [waits[one] for one, two in pairs if one in waits and two in waits[one].differing]
    disputed = differing[0] if differing else None
    acts = {one: find_act(graph, one, kind, disputed) for one in sorted(graph.states)}
    told = {other} | (culprits or waits.keys())
    alike = [one for one in acts if one in told and acts[one] == acts[other]]
    parties = [(alike, acts[other])]
    if rank is not None:
        others = [one for one in acts if one in waits and one not in alike]
        same = [one for one in others if acts[one] == acts[rank]]
        waiting = [one for one in same if other in waits[one].missing or one == rank]
        parties.append((waiting, acts[rank]))
    rows = {one: list_cells(graph, one) for one in acts}
    seen = graph.states.keys() - graph.find_doing(Doing.NOT_SEEN)
    table = draw_table(rows, {one: graph.states[one].since for one in seen})
    edges = tuple((one, tuple(sorted(wait.missing))) for one, wait in sorted(waits.items()))
    told_of = replace(compose(kind, culprits, parties, table, unknown), waits=edges)
    if kind == Kind.ENDED and rank is not None and waits[rank].operation.kind != COLLECTIVE:
        return replace(told_of, cure=UNANSWERED.format(rank=rank, other=other))
    return told_of


def find_act(graph: WaitGraph, rank: int, kind: Kind, disputed: Dependency | None) -> Predicate:
    """A rank's act, or its call in the place of a disputed operation."""
    state, wait = graph.states[rank], graph.waits.get(rank)
    called = graph.meet(disputed.operation).get(rank) if disputed else None
    if called and not (wait and is_at(wait.operation, called.channel, called.index)):
        return has_called(called, kind)
    if wait:
        others = (each.operation for each in graph.waits.values())
        by_model = kind == Kind.ABORTED and any(are_models(wait.operation, one) for one in others)
        what = detail(wait.operation, Kind.MODELS if by_model else kind)
        line = wait.operation.line
        if kind == Kind.ABORTED and ABORT in state.end:
            several = re.sub("^was ", "were ", state.end)
            return Predicate(f"{state.end} in {what}", f"{several} in {what}", line)
        return Predicate(f"is in {what}", f"are in {what}", line, wait.operation.name)
    last = state.operations[-1].line if state.operations and state.doing == Doing.FINISHED else ""
    one, several = ACTS.get(state.doing) or (state.end, re.sub("^was ", "were ", state.end))
    return Predicate(one or "is dead", several or "are dead", state.line or last)


def are_models(one: Operation, other: Operation) -> bool:
    """Whether two operations are the same part of DDP, for different models."""
    return one.name in OF_DDP and find_difference(one, other) == Kind.MODELS


def list_cells(graph: WaitGraph, rank: int) -> tuple[str, str, str]:
    """A rank's state, its line, and the ranks that it waits for."""
    state, wait = graph.states[rank], graph.waits.get(rank)
    if wait is None:
        return (state.doing == Doing.DEAD and state.end) or state.doing, state.line, ""
    told = (
        Kind.WRONG_TAG if wait.operation.kind != COLLECTIVE and wait.operation.tag else Kind.ROOTS
    )
    doing = f"{detail(wait.operation, told)} #{wait.operation.index}"
    awaited = format_ranks(wait.missing)
    if wait.any_one and len(wait.missing) > 1:
        awaited = f"any of {awaited}"
    return doing, wait.operation.line, awaited


def detail(operation: Operation, kind: Kind) -> str:
    """An operation, with what matters for this kind of diagnosis."""
    name, peer, shape = operation.name, operation.peer, list(operation.shape)
    if operation.kind != COLLECTIVE:
        whom = "anyone" if peer is None else f"rank {peer}"
        if operation.stranger is not None:
            whom = f"rank {operation.stranger} of {len(operation.group)}"
        name += f" {'to' if operation.kind == SEND else 'from'} {whom}"
    elif kind == Kind.ROOTS and peer is not None:
        name += f" {'to' if name in TO_ROOT else 'from'} rank {peer}"
    members = format_ranks(operation.members)
    more = {
        Kind.PARTIAL_GROUP: f" of ranks {members}" if members else "",
        Kind.UNWAITED: " and not waited for it" if operation.kind == SEND else "",
        Kind.STRANGER: ", which does not exist" if operation.stranger is not None else "",
        Kind.STORES: f" at {operation.dtype or 'the place that was launched'}",
        Kind.OPS: f" with {REDUCTIONS[operation.tag % len(REDUCTIONS)]}",
        Kind.SHAPES: f" of shape {shape}",
        Kind.ABORTED: f" of shape {shape}" if shape else "",
        Kind.DTYPES: f" of {operation.dtype}",
        Kind.SIZES: f" of {operation.dtype}{shape}",
        Kind.GROUPS: f" of group {operation.number} (ranks {format_ranks(operation.group)})",
        Kind.WRONG_TAG: f" with tag {operation.tag}",
        Kind.MODELS: f" of model {operation.tag}" if name in OF_DDP and operation.tag > 0 else "",
    }
    return name + more.get(kind, "")


def compose(
    kind: Kind, culprits: Iterable[int], parties: Sequence[tuple[Sequence[int], Predicate]],
    table: str,
    unknown: str | None,
) -> Diagnosis:  # fmt: skip
    """A diagnosis of what one party does, and another that waits for it, if there is one. `unknown`
    is what a proof lacks; None if nobody is blocked."""
    act = parties[0][1]
    said = [
        some.say(ranks, act.line if some is not act else "") for ranks, some in parties if ranks
    ]
    sentence = (" while " if unknown is None and not act.is_over else " where ").join(said)
    if unknown is not None:
        sentence = f"deadlock: {sentence}"
    if unknown:
        sentence = f"probably a {sentence}"
    return Diagnosis(
        kind=kind,
        culprits=tuple(sorted(culprits)),
        operation=next((some.operation for _, some in parties if some.operation), ""),
        line=act.line,
        proved=unknown == "",
        unknown=unknown or "",
        sentence=textwrap.fill(sentence, WIDTH),
        table=table,
        cure=kind.cure,
    )


def draw_table(rows: Mapping[int, tuple[str, str, str]], since: Mapping[int, float]) -> str:
    """States of ranks, their lines, whom they wait for, and since when. Ranks that do the same
    share a row."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, cells in rows.items():
        alike.setdefault(cells, []).append(rank)
    lines = [("rank", "does", "since", "where", "waits for")]
    for (doing, where, awaited), ranks in alike.items():
        longest = max((since[rank] for rank in ranks if rank in since), default=None)
        seconds = "" if longest is None else f"{longest:.{1 if longest < 1000 else 0}f} s"
        lines.append((format_ranks(ranks), doing, seconds, where, awaited))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = WIDTH - 2 * (len(widths) - 1)
    for column in (4, 0, 1, 3):
        excess = max(0, sum(widths) - room)
        widths[column] = max(widths[column] - excess, min(widths[column], WIDTHS[column]))
    table = (
        [shorten(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in table)


def shorten(text: str, width: int) -> str:
    """A line of a program loses its function first, then the beginning of the file's name."""
    if len(text) > width:
        text = re.sub(r"(:\d+) in .*", r"\1", text)
    if len(text) > width:
        return "…" + text[1 - width :] if re.search(r":\d+$", text) else text[: width - 1] + "…"
    return text


def format_ranks(ranks: Iterable[int]) -> str:
    """0-2, 5"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
