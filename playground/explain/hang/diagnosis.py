"""Why ranks stand still, in words: a deadlock is proved from what they have called, without any
timeout; otherwise the last to come is named. And what ranks called differently although nothing
stood still.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from playground.base.ranks import name_ranks
from playground.explain.hang.differences import (
    OF_ONE_NAME,
    ask_for_group,
    compose_difference,
    find_cure,
    find_first_difference,
    find_strays,
    group_of,
    note_difference,
    note_surplus,
)
from playground.explain.hang.raised import note_raised
from playground.explain.hang.states import (
    BUFFERS,
    COLLECTIVE,
    FORM_WORLD,
    ISSUED,
    NEW_GROUP,
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
from playground.explain.hang.streams import stand_in_streams
from playground.explain.hang.wait_graph import (
    Dependency,
    WaitGraph,
    find_difference,
    is_at,
    leave_out_renumbered,
    list_known,
    tell_apart,
)
from playground.explain.hang.wording import (
    ABORT,
    ACTS,
    MOST_PARTIES,
    UNLIKE,
    Diagnosis,
    Predicate,
    compose,
    detail,
    draw_last,
    draw_states,
    draw_table,
    has_called,
    shorten,
)
from playground.explain.hang.workers import find_cure_of_worker

LATE = {
    Doing.DEAD: Kind.LOST,
    Doing.STOPPED: Kind.SUSPENDED,
    Doing.IN_PROGRAM: Kind.STRAGGLER,
    Doing.NOT_SEEN: Kind.UNSEEN,
}
"""The kind of the diagnosis if others wait for such a rank."""
STRAGGLERS = "look at what those ranks do there: the others wait for them"
"""The cure of stragglers, where there are several."""
JOINS = "whether other processes join that world"


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """Who waits for whom, and why; None if no rank waits in an operation, is stopped or dead. Only
    states of the same moment prove a deadlock: states between which no rank has moved."""
    states = stand_in_streams(leave_out_renumbered(states))
    found = find_cause(states)
    if found is None:
        return None
    return find_unlaunched(found, states) or note_raised(note_difference(found, states), states)


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
        return note_raised(compose_difference(first, was, draw_last(graph)), was)
    found = find_cause(was, is_over=True)
    if found is None or found.kind == Kind.LOST:  # which its failure says itself
        return None
    if found.kind != Kind.RUNNING:
        return note_raised(note_surplus(found, was), was)
    aborted = {rank for rank in dead & graph.waits.keys() if ABORT in graph.states[rank].end}
    if not aborted:
        return None
    others = min(graph.waits.keys() - aborted, default=None)
    told = describe(graph, Kind.ABORTED, aborted, min(aborted), others)
    return replace(told, table=draw_last(graph))


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
    for view in (idle, WaitGraph(idle.states.values(), pessimistic=True)):
        if blocked := view.find_blocked(view.waits, set()):
            unknown = None if is_over else list_unknown(graph, blocked)
            return explain(view, view.waits, blocked, unknown)
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
        whom = f"{name_ranks(absent)} of {len(one.group)}"
        what = f"in {one.name}, which waits for {whom}: there are {there}"
        act = Predicate(f"is {what}", f"are {what}", one.line, one.name)
        return compose(Kind.TOO_FEW, alike, [(alike, act)], draw_states(graph), None)
    return None


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
    told = (f"{why} ({name_ranks(ranks)})" for why, ranks in unknown.items())
    return ", ".join(told) or "which ranks the operations still need"


def tell(states: Sequence[RankState], nobody_waits: str = "no rank waits") -> str:
    """The diagnosis or, if no rank waits, what each does, below a line that says so."""
    rows = {state.rank: (state.end or state.doing, state.line, "") for state in states}
    since = {state.rank: state.since for state in states}
    return str(diagnose(states) or f"{nobody_waits}\n{draw_table(rows, since)}")


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
    # of several culprits: what they do to each other, and what other ranks expect of them
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
        same = (channel.group, channel.number) == (message.group, message.number)
        if channel.kind != kind or channel.peer != rank or same == (channel.tag == message.tag):
            continue
        met = [channel._replace(kind=message.kind, peer=other)]
        if kind == SEND:
            met.append(channel._replace(kind=RECEIVE, peer=None))  # a receive from anyone
        if count > graph.count(rank, *met):
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
    if lost := find_unwaited(graph) or find_unwaited_receive(graph):
        return lost
    called = [rank for rank, wait in graph.waits.items() if not wait.missing] or graph.waits
    return describe(graph, Kind.RUNNING, set(), min(called)) if graph.waits else None


def find_unwaited(graph: WaitGraph) -> Diagnosis | None:
    """A receive whose message has been sent by an isend that its rank has not waited for: where the
    program keeps no `Work`, the message may never be sent."""
    for rank, wait in sorted(graph.waits.items()):
        mine = wait.operation
        if mine.kind != RECEIVE or mine.peer not in graph.states:
            continue
        channel = Channel(SEND, mine.group, rank, mine.tag, mine.number)
        known = list_known(graph.states[mine.peer])
        sent = next((one for one in known if is_at(one, channel, mine.index)), None)
        if sent and sent.state == ISSUED:
            act = has_called(sent, Kind.UNWAITED)
            waits = find_act(graph, rank, Kind.UNWAITED, None)
            parties = [([mine.peer], act), ([rank], waits)]
            return compose(Kind.UNWAITED, {mine.peer}, parties, draw_states(graph), None)
    return None


def find_unwaited_receive(graph: WaitGraph) -> Diagnosis | None:
    """A receive whose message has been sent, after one from the same rank that its rank has not
    waited for: where the program keeps no `Work` of that one, the next message may be lost."""
    for rank, wait in sorted(graph.waits.items()):
        mine = wait.operation
        if mine.kind != RECEIVE or wait.missing:
            continue
        known = (one for one in graph.states[rank].operations if one.channel == mine.channel)
        if before := next((one for one in known if one.state == ISSUED), None):
            kind = Kind.UNWAITED_RECEIVE
            words = f"not waited for its {detail(before, kind)}"
            act = Predicate(f"has {words}", f"have {words}", before.line, before.name)
            waits = Predicate("is in a later one", "are in a later one", mine.line)
            return compose(kind, {rank}, [([rank], act), ([rank], waits)], draw_states(graph), None)
    return None


UNANSWERED = "have rank {other} take part in this message, or rank {rank} leave it out"
"""The cure where a rank waits for a message with one that has finished."""
ALONE = f"If so, {Kind.ALONE.cure}"
"""What to do if that is the forward pass of a wrapped model."""
UNSHARED = (
    "{ranks} {make} a call ({line}) that {others} {do} not: is it under a condition on the rank?"
    "{more}"
)
"""The cure where a rank waits in a collective whose line the others have not called from."""


def describe(
    graph: WaitGraph,
    kind: Kind,
    culprits: set[int],
    other: int,
    rank: int | None = None,
    unknown: str | None = None,
) -> Diagnosis:
    """`rank` waits for `other`, which is the culprit or one of them."""
    parties = list_parties(graph, kind, culprits, other, rank)
    found = compose(kind, culprits, parties, draw_states(graph, with_unseen=True), unknown)
    waits = sorted(graph.waits.items())
    edges = tuple((one, tuple(sorted(wait.missing))) for one, wait in waits)
    return replace(
        found, waits=edges, cure=find_cure_here(graph, kind, found.culprits, other, rank)
    )


def list_parties(
    graph: WaitGraph, kind: Kind, culprits: set[int], other: int, rank: int | None
) -> list[tuple[Sequence[int], Predicate]]:
    """Who does what: the ranks that do the same as `other`, those that wait as `rank` does, and
    where calls differ in what they carry, the further calls."""
    waits, pairs = graph.waits, ((rank, other), (other, rank))
    differing = [waits[one] for one, two in pairs if one in waits and two in waits[one].differing]
    disputed = differing[0] if differing else None
    acts = {one: find_act(graph, one, kind, disputed) for one in sorted(graph.states)}
    told = {other} | (culprits or waits.keys())
    alike = [one for one in acts if one in told and acts[one] == acts[other]]
    parties: list[tuple[Sequence[int], Predicate]] = [(alike, acts[other])]
    if rank is not None:
        others = [one for one in acts if one in waits and one not in alike]
        same = [one for one in others if acts[one] == acts[rank]]
        waiting = [one for one in same if other in waits[one].missing or one == rank]
        parties.append((waiting, acts[rank]))
    if kind in UNLIKE and disputed:
        met = graph.meet(disputed.operation)
        for act in dict.fromkeys(acts[one] for one in sorted(met)):
            if len(parties) < MOST_PARTIES and act not in (each for _, each in parties):
                parties.append(([one for one in met if acts[one] == act], act))
    return parties


def find_cure_here(
    graph: WaitGraph, kind: Kind, culprits: Sequence[int], other: int, rank: int | None
) -> str:
    """The cure where `rank` waits for `other`: that of the kind, unless the lines tell more."""
    if kind in (Kind.BESIDE_DDP, Kind.COLLECTIVES, *OF_ONE_NAME):
        group = group_of(graph.waits[other if rank is None else rank].operation.channel)
        calls = {
            one: wait.operation
            for one, wait in graph.waits.items()
            if group_of(wait.operation.channel) == group
        }
        return find_cure(kind, calls, graph.states.values())
    if kind == Kind.STRAGGLER and graph.states[other].worker:
        return find_cure_of_worker(graph.states[other])
    if kind == Kind.STRAGGLER and culprits[1:]:
        return STRAGGLERS
    if kind == Kind.ENDED and rank is not None:
        if graph.waits[rank].operation.kind != COLLECTIVE:
            return UNANSWERED.format(rank=rank, other=other)
        alone = f" {ALONE}" if graph.waits[rank].operation.name == BUFFERS else ""
        by_counts = waits_in_ddp(graph, rank) and explain_counts(graph.states.values())
        unshared = find_unshared(graph, rank)
        return by_counts or (unshared and f"{unshared}{alone}") or kind.cure
    return kind.cure


def waits_in_ddp(graph: WaitGraph, rank: int) -> bool:
    return graph.waits[rank].operation.name in OF_DDP


def find_unshared(graph: WaitGraph, rank: int) -> str:
    """The cure where a rank waits in a collective, and those that have finished have called nothing
    from its line; empty if they have."""
    one, missing = graph.waits[rank].operation, graph.waits[rank].missing
    others = sorted(missing & graph.find_doing(Doing.FINISHED))
    if not one.line or any(
        call.line == one.line for other in others for call in graph.states[other].operations
    ):
        return ""
    ranks = [each for each, wait in graph.waits.items() if wait.operation.line == one.line]
    return UNSHARED.format(
        ranks=name_ranks(ranks), make="make" if ranks[1:] else "makes",
        line=shorten(one.line.partition(" in ")[0], 24),
        others=name_ranks(others), do="do" if others[1:] else "does",
        more=ask_for_group(one, ranks, graph.states),
    )  # fmt: skip


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
        if caller := state.find_caller(wait.operation):
            what = f"{caller}'s {what}"
        line = wait.operation.line
        if kind == Kind.ABORTED and ABORT in state.end:
            return Predicate(f"{state.end} in {what}", f"{of_several(state.end)} in {what}", line)
        return Predicate(f"is in {what}", f"are in {what}", line, wait.operation.name)
    if state.worker:
        at = f" at {state.worker_line.partition(' in ')[0]}" if state.worker_line else ""
        return Predicate(
            f"waits for {state.worker}{at}", f"wait for {state.worker}{at}", state.line,
            about_line="its loop: " if at else "",
        )  # fmt: skip
    one, several = ACTS.get(state.doing) or (state.end, of_several(state.end))
    if state.operations and state.doing == Doing.FINISHED and not state.line:
        last = state.operations[-1]
        return Predicate(one, several, last.line, about_line=f"last call: {last.name}, ")
    return Predicate(one or "is dead", several or "are dead", state.line)


def of_several(end: str) -> str:
    """How a rank ended, of several: "was killed", "were killed"."""
    return re.sub("^was ", "were ", end)


def are_models(one: Operation, other: Operation) -> bool:
    """Whether two operations are the same part of DDP, for different models."""
    return one.name in OF_DDP and find_difference(one, other) == Kind.MODELS
