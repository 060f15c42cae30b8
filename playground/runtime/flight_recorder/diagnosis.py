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

from playground.runtime.flight_recorder import (
    COLLECTIVE,
    FORM_WORLD,
    NEW_GROUP,
    RECEIVE,
    SEND,
    Channel,
    Doing,
    Kind,
    Operation,
    RankState,
)
from playground.runtime.flight_recorder.wait_graph import (
    TO_ROOT,
    Dependency,
    WaitGraph,
    find_difference,
    find_minority,
    is_at,
    leave_out_renumbered,
    list_known,
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

    def __str__(self) -> str:
        unknown = [textwrap.fill(f"not known: {self.unknown}", WIDTH)] if self.unknown else []
        return "\n".join((self.sentence, self.table, *unknown, self.cure))


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


def has_called(operation: Operation, kind: Kind) -> Predicate:
    what = detail(operation, kind)
    return Predicate(
        f"has called {what}", f"have called {what}", operation.line, operation.name, is_over=True
    )


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """Who waits for whom, and why; None if no rank waits in an operation, is stopped or dead. Only
    states of the same moment prove a deadlock: states between which no rank has moved."""
    states = leave_out_renumbered(states)
    graph = WaitGraph(states)
    idle = WaitGraph([replace(state, may_act="", unnamed="") for state in states])
    if firm := graph.find_blocked(find_firm(graph), set()):
        blocked = firm | {
            rank for rank in idle.find_blocked(idle.waits, set()) if idle.waits[rank].missing & firm
        }
        return explain(idle, blocked, blocked, unknown="")
    for judge in (idle, WaitGraph(idle.states.values(), pessimistic=True)):
        if blocked := judge.find_blocked(judge.waits, set()):
            return explain(judge, judge.waits, blocked, unknown=list_unknown(graph, blocked))
    return find_late(graph)


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
        rank for rank, wait in waits if not (wait.operation.may_give_up or moving & wait.parties)
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
            ("whether it gives up", rank in blocked and graph.waits[rank].operation.may_give_up),
        )
        for reason in (reason for reason, holds in reasons if holds and reason):
            unknown.setdefault(reason, set()).add(rank)
    told = (
        f"{why} (rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)})"
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
    graph = WaitGraph(state for state in leave_out_renumbered(states) if not state.unnamed)
    meetings: dict[tuple[object, ...], dict[int, Operation]] = {}
    if strays := {
        rank: one
        for rank, state in graph.states.items()
        for one in list_known(state)
        if one.stranger is not None
    }:
        first = min(strays)
        told = [([first], has_called(strays[first], Kind.STRANGER))]
        rows = {one: (detail(strays[one], Kind.ROOTS), strays[one].line, "") for one in strays}
        return compose(Kind.STRANGER, strays, told, draw_table(rows, {}), None)
    for rank, state in graph.states.items():
        for one in list_known(state):
            key: tuple[object, ...] = one.channel, one.index
            if one.kind != COLLECTIVE:
                sender, receiver = (rank, one.peer) if one.kind == SEND else (one.peer, rank)
                if graph.count(receiver, (RECEIVE, one.group, None, one.tag, one.number)):
                    continue  # a receive from anyone may have got any of them
                key = sender, receiver, one.group, one.tag, one.number, one.index
            meetings.setdefault(key, {})[rank] = one
    for met in sorted(meetings.values(), key=lambda met: min(one.issued for one in met.values())):
        some = next(iter(met))
        if any(find_difference(met[some], one, strictly=True) for one in met.values()):
            culprits = find_minority(met, strictly=True)
            other = min(culprits)
            rank = next(one for one in met if find_difference(met[one], met[other], strictly=True))
            kind = find_difference(met[rank], met[other], strictly=True)
            assert kind
            rows = {one: (detail(met[one], kind), met[one].line, "") for one in sorted(met)}
            acts = {one: has_called(met[one], kind) for one in sorted(met)}
            parties = [
                ([one for one in acts if acts[one] == acts[some]], acts[some])
                for some in (other, rank)
            ]
            return compose(kind, culprits, parties, draw_table(rows, {}), None)
    return None


def explain(graph: WaitGraph, held: Iterable[int], blocked: set[int], unknown: str) -> Diagnosis:
    """Why these ranks are blocked: for ever, if nothing is unknown."""
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
        difference := find_difference(mine, graph.meet(mine)[other])
    ):
        return difference
    if mine.kind != COLLECTIVE and (stray := find_stray(graph, rank, other, mine)):
        return stray
    if NEW_GROUP in (mine.name, theirs and theirs.name):
        return Kind.PARTIAL_GROUP
    if theirs is None:
        return Kind.UNFORMED if mine.name == FORM_WORLD else Kind.ENDED
    same = (mine.group, mine.number) == (theirs.group, theirs.number)
    if mine.kind == theirs.kind == COLLECTIVE:
        if same:
            return Kind.COLLECTIVES if mine.channel != theirs.channel else Kind.CIRCLE
        return Kind.GROUPS if mine.name == theirs.name else Kind.ABSENT
    if COLLECTIVE in (mine.kind, theirs.kind):
        return Kind.ABSENT
    if mine.kind != theirs.kind:
        if same and mine.tag == theirs.tag:
            return Kind.WRONG_PEER
        return Kind.WRONG_TAG if theirs.peer in (rank, None) and same else Kind.CIRCLE
    kinds = {graph.waits[one].operation.kind if one in graph.waits else "" for one in culprits}
    return Kind.CIRCLE if len(kinds) > 1 else Kind.SENDS if mine.kind == SEND else Kind.RECEIVES


def find_stray(graph: WaitGraph, rank: int, other: int, message: Operation) -> Kind | None:
    """The kind of difference from an unmatched message between the same ranks, if there is one."""
    kind = RECEIVE if message.kind == SEND else SEND
    for channel, count in graph.states[other].counts.items():
        _, group, peer, tag, number = channel
        same = (group, number) == (message.group, message.number)
        if channel[0] == kind and peer == rank and same != (tag == message.tag):
            anyone: list[Channel] = [(RECEIVE, group, None, tag, number)] * (kind == SEND)
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
    return describe(graph, Kind.RUNNING, set(), min(graph.waits)) if graph.waits else None


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
    return replace(compose(kind, culprits, parties, table, unknown), waits=edges)


def find_act(graph: WaitGraph, rank: int, kind: Kind, disputed: Dependency | None) -> Predicate:
    """A rank's act, or its call in the place of a disputed operation."""
    state, wait = graph.states[rank], graph.waits.get(rank)
    called = graph.meet(disputed.operation).get(rank) if disputed else None
    if called and not (wait and is_at(wait.operation, called.channel, called.index)):
        return has_called(called, kind)
    if wait:
        what = detail(wait.operation, kind)
        return Predicate(
            f"is in {what}", f"are in {what}", wait.operation.line, wait.operation.name
        )
    last = state.operations[-1].line if state.operations and state.doing == Doing.FINISHED else ""
    one, several = ACTS.get(state.doing) or (state.end, re.sub("^was ", "were ", state.end))
    return Predicate(one or "is dead", several or "are dead", state.line or last)


def list_cells(graph: WaitGraph, rank: int) -> tuple[str, str, str]:
    """A rank's state, its line, and the ranks that it waits for."""
    state, wait = graph.states[rank], graph.waits.get(rank)
    if wait is None:
        return (state.doing == Doing.DEAD and state.end) or state.doing, state.line, ""
    told = (
        Kind.WRONG_TAG if wait.operation.kind != COLLECTIVE and wait.operation.tag else Kind.ROOTS
    )
    doing = f"{detail(wait.operation, told)} #{wait.operation.index}"
    awaited = "any of " * (wait.any_one and len(wait.missing) > 1) + format_ranks(wait.missing)
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
    more = {
        Kind.PARTIAL_GROUP: f" of ranks {format_ranks(operation.members)}"
        * bool(operation.members),
        Kind.STRANGER: ", which does not exist" * (operation.stranger is not None),
        Kind.SHAPES: f" of shape {shape}",
        Kind.DTYPES: f" of {operation.dtype}",
        Kind.SIZES: f" of {operation.dtype}{shape}",
        Kind.GROUPS: f" of group {operation.number} (ranks {format_ranks(operation.group)})",
        Kind.WRONG_TAG: f" with tag {operation.tag}",
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
    sentence = "probably a " * bool(unknown) + "deadlock: " * (unknown is not None) + sentence
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
