"""Who waits for whom, and why: a deadlock is proved from what the ranks have called, without any timeout.

A wait graph has an edge from each rank in an operation to the ranks that the operation lacks. Some operations need all of
them (AND: an all-reduce), some any one (OR: a receive from anyone). Ranks that may act of themselves release those that
wait for them, and so on; ranks that are never released are in a deadlock. Whoever is to blame is found by excusing: if
all were released by one rank doing what the others expect of it, it is that one.

Source: Hilbrich, Protze, Schulz, de Supinski, Müller: MPI Runtime Error Detection with MUST (2012)
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from playground.runtime.black_box import (
    BACKWARD,
    COLLECTIVE,
    DEAD,
    DONE,
    FINISHED,
    IN_OPERATION,
    IN_PROGRAM,
    NEW_GROUP,
    RECEIVE,
    SEND,
    STOPPED,
    Channel,
    Operation,
    RankState,
)

NOT_SEEN = "not seen"
"""What a rank does of which no state is given, as on another host."""
IN_FINALLY, PARTIAL_GROUP, WRONG_TAG = "a collective in `finally`", "a group not made by all", "wrong tag"
COLLECTIVES, ROOTS, SHAPES = "different collectives", "different roots", "different shapes"
DTYPES, SIZES = "different dtypes", "different sizes"
GROUPS, WRONG_PEER, SENDS, RECEIVES = "different groups", "wrong peer", "send against send", "receive against receive"
ENDED, ABSENT, CIRCLE = "a rank that has finished", "a rank that does not take part", "circular wait"
LOST, SUSPENDED, STRAGGLER, UNSEEN, RUNNING = "dead", "stopped", "straggler", "a rank that is not seen", "in progress"
CURES = {
    IN_FINALLY: "call collectives after success only: the others do not know that this rank failed",
    WRONG_TAG: "use the same tag for a send and its receive, in the same order on both ranks",
    COLLECTIVES: "call the same collectives in the same order on all ranks of the group",
    ROOTS: "pass the same root on all ranks of the group",
    SHAPES: "pass tensors of the same shape on all ranks of the group",
    DTYPES: "pass tensors of the same dtype on all ranks",
    SIZES: "receive into a tensor of the size and dtype that is sent",
    GROUPS: "pass the same group on all ranks that shall meet",
    WRONG_PEER: "let the receiver name the rank that sends, and the sender the rank that receives",
    PARTIAL_GROUP: "call new_group on all ranks of the world, in the same order",
    SENDS: "let one of two ranks receive first, or use isend or batch_isend_irecv",
    RECEIVES: "let one of two ranks send first, or use irecv or batch_isend_irecv",
    ENDED: "let all ranks make the same number of calls: equal numbers of batches, or join()",
    ABSENT: "call the collective on all ranks of the group, outside branches that depend on the rank",
    CIRCLE: "order the messages so that no rank waits for one that waits for it, or use isend",
    LOST: "look for why that rank ended: the others wait for it in vain",
    SUSPENDED: "continue that process (kill -CONT PID), or end the run",
    STRAGGLER: "look at what that rank does there: the others wait for it",
    UNSEEN: "look at the output on the host of that rank",
    RUNNING: "wait, or look at the network: all have called it, and it is not over",
}
"""What to do, by kind: one line."""
KINDS = tuple(CURES)
"""The first one that explains a wait is told."""
DIFFERENCES = (COLLECTIVES, ROOTS, SHAPES, DTYPES)
ACTS = {FINISHED: "has finished", STOPPED: "is stopped", IN_PROGRAM: "is in the program", NOT_SEEN: "is not seen"}
NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", NEW_GROUP, BACKWARD)
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
WIDTH = 80
"""Columns."""
MIRRORED = {SEND: RECEIVE, RECEIVE: SEND}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why ranks wait, or what they did differently."""

    kind: str
    """A key of `CURES`."""
    culprits: tuple[int, ...]
    """Ranks, ascending: several where nothing tells which of them is wrong."""
    operation: str
    """That the first culprit is in, or, if it is in none, that the others wait in."""
    line: str
    """Where the first culprit is, if known."""
    proved: bool
    """Whether ranks wait that cannot be released any more, whatever the others do."""
    sentence: str
    table: str
    """What each rank does: one row per rank, or for several that do the same."""
    cure: str

    def __str__(self) -> str:
        return "\n".join((self.sentence, self.table, self.cure))


@dataclass(frozen=True, slots=True)
class Wait:
    """What an operation lacks."""

    operation: Operation
    absent: frozenset[int]
    """Ranks that have not called their part of it."""
    differing: frozenset[int]
    """Ranks that have called something else in its place."""
    any_one: bool = False
    """Whether any one of these ranks may release it, not only all."""

    @property
    def missing(self) -> frozenset[int]:
        return self.absent | self.differing

    def is_released(self, inert: set[int], excused: set[int]) -> bool:
        """Whether it may end, if all ranks but the `inert` act, and the `excused` did what is expected."""
        if self.any_one:
            return not self.absent <= inert or self.missing <= excused
        return self.differing <= excused and self.absent.isdisjoint(inert)


@dataclass(frozen=True, slots=True)
class Act:
    """What a rank does or has done, as a sentence says it."""

    phrase: str
    """Its first word is is, has or was."""
    line: str
    operation: str
    """Its name, if it is one."""

    def tell(self, ranks: Sequence[int], before: str = "") -> str:
        """That these ranks do it. A line in the same file as the line `before` is told without the file."""
        several = len(ranks) > 1
        listed = shorten(format_ranks(ranks), 16)
        verb, _, rest = self.phrase.partition(" ")
        verb = {"is": "are", "has": "have", "was": "were"}.get(verb, verb) if several else verb
        place = self.line.partition(" in ")[0]
        file, _, number = place.rpartition(":")
        place = f":{number}" if file and before.startswith(f"{file}:") else place
        return f"rank{'s' * several} {listed} {verb} {rest}" + f" ({place})" * bool(place)


class Calls:
    """What all ranks have called, and what they do. Where that depends on the algorithm, or on which messages a receive
    from anyone got, operations may end that might; `pessimistic`, they need all ranks, and may not."""

    def __init__(self, states: Iterable[RankState], pessimistic: bool = False) -> None:
        self.pessimistic = pessimistic
        self.states = {state.rank: state for state in states}
        self.meetings: dict[tuple[Channel, int], dict[int, Operation | None]] = {}
        self.waits = {
            rank: self.find_wait(rank, state.waits_for)
            for rank, state in self.states.items()
            if state.doing == IN_OPERATION and state.waits_for
        }
        missing: set[int] = set().union(*(wait.missing for wait in self.waits.values()))
        self.states |= {rank: RankState(rank=rank, doing=NOT_SEEN) for rank in missing - self.states.keys()}
        self.finished = self.ranks_doing(FINISHED)

    def ranks_doing(self, doing: str) -> set[int]:
        return {rank for rank, state in self.states.items() if state.doing == doing}

    def count(self, rank: int | None, *channel: object) -> int:
        state = None if rank is None else self.states.get(rank)
        return state.counts.get(channel, 0) if state else 0  # type: ignore[call-overload]

    def meet(self, operation: Operation) -> dict[int, Operation | None]:
        """What the ranks that have called their part of a collective have called, by rank; None where that is not known
        any more."""
        channel, index = operation.channel, operation.index
        if (channel, index) not in self.meetings:
            self.meetings[channel, index] = {
                rank: next((one for one in list_known(self.states[rank]) if is_at(one, channel, index)), None)
                for rank in operation.group
                if self.count(rank, *channel) > index
            }
        return self.meetings[channel, index]

    def find_wait(self, rank: int, operation: Operation) -> Wait:
        if operation.kind != COLLECTIVE:
            anyone = operation.peer is None
            others = {*operation.group} - {rank} if anyone else {operation.peer}
            absent = frozenset() if self.is_matched(rank, operation) else frozenset(others)
            return Wait(operation, absent, frozenset(), anyone)  # type: ignore[arg-type]
        met, family, root = self.meet(operation), find_family(operation.name), operation.peer
        needed, any_one = {*operation.group} - {rank}, family not in NEED_ALL
        if self.pessimistic:
            any_one = False
        elif root is not None and root != rank and (family in FROM_ROOT or (family == "gather" and root in met)):
            needed, any_one = {root}, False
        elif family in TO_ROOT and root == rank:
            any_one = False
        differing = {one for one in needed & met.keys() if find_difference(operation, met[one], self.pessimistic)}
        return Wait(operation, frozenset(needed - met.keys()), frozenset(differing), any_one)

    def is_matched(self, rank: int, message: Operation) -> bool:
        """Whether the other part of a message may have been called. If receives from anyone are about, that errs on the
        side of yes."""
        group, tag = message.group, message.tag
        if message.kind == SEND and self.pessimistic and self.count(message.peer, RECEIVE, group, None, tag):
            sent = sum(self.count(sender, SEND, group, message.peer, tag) for sender in group)
            return sent <= sum(self.count(message.peer, RECEIVE, group, peer, tag) for peer in (*group, None))
        if message.kind == SEND:
            return sum(self.count(message.peer, RECEIVE, group, peer, tag) for peer in (rank, None)) > message.index
        if message.peer is not None:
            return self.count(message.peer, SEND, group, rank, tag) > message.index
        state = self.states[rank]
        sent = sum(self.count(sender, SEND, group, rank, tag) for sender in group)
        called = sum(self.count(rank, RECEIVE, group, peer, tag) for peer in (*group, None))
        pending = {
            (one.channel, one.index)
            for one in list_known(state)
            if (one.kind, one.group, one.tag) == (RECEIVE, group, tag) and one.state != DONE
        }
        return sent > called - len(pending)

    def find_blocked(self, held: Iterable[int], excused: set[int]) -> set[int]:
        """Of the ranks that can do nothing but wait, those that are never released."""
        blocked = {*held} - excused
        inert = (blocked | self.finished) - excused
        while released := {rank for rank in blocked if self.waits[rank].is_released(inert, excused)}:
            blocked -= released
            inert -= released
        return blocked

    def find_culprits(self, held: Iterable[int], blocked: set[int]) -> set[int]:
        """Those without whose fault nobody would be blocked; else those that a majority disagrees with."""
        if failing := {rank for rank in blocked if self.waits[rank].operation.raised}:
            return failing
        ended = self.finished & set[int]().union(*(self.waits[rank].absent for rank in blocked))
        differing = set[int]().union(*(self.waits[rank].differing for rank in blocked))
        excusable = {rank for rank in blocked | ended | differing if not self.find_blocked(held, {rank})}
        waiting = [self.waits[rank].operation for rank in blocked if self.waits[rank].absent & ended]
        if ended and all(one.kind == COLLECTIVE for one in waiting) and not self.find_blocked(held, ended):
            return ended & excusable or ended
        disputed = [self.waits[rank].operation for rank in blocked if self.waits[rank].differing]
        minority = find_minority(self.meet(min(disputed, key=lambda one: one.index))) if disputed else set()
        if culprits := excusable & minority or excusable or minority:
            return culprits
        partial = [self.waits[rank].absent for rank in blocked if self.waits[rank].operation.name == NEW_GROUP]
        if absent := set[int]().union(*partial) & (blocked | ended):
            return absent
        return find_minority({rank: self.waits[rank].operation for rank in blocked}, is_elsewhere) | ended or blocked

    def classify(self, rank: int, other: int, culprits: set[int]) -> str:
        """Why one rank waits for another."""
        mine, their = self.waits[rank].operation, self.waits.get(other)
        theirs = their.operation if their else None
        if mine.raised or (theirs and theirs.raised):
            return IN_FINALLY
        if other in self.waits[rank].differing:
            return find_difference(mine, self.meet(mine)[other])
        if NEW_GROUP in (mine.name, theirs.name if theirs else ""):
            return PARTIAL_GROUP
        if mine.kind != COLLECTIVE and (stray := self.find_stray(rank, other, mine)):
            return WRONG_TAG if stray == mine.group else GROUPS
        if theirs is None:
            return ENDED
        if mine.kind == theirs.kind == COLLECTIVE:
            if mine.group == theirs.group:
                return COLLECTIVES if mine.channel != theirs.channel else CIRCLE
            return GROUPS if mine.name == theirs.name else ABSENT
        if COLLECTIVE in (mine.kind, theirs.kind):
            return ABSENT
        if mine.kind != theirs.kind:
            return WRONG_PEER if (mine.group, mine.tag) == (theirs.group, theirs.tag) else CIRCLE
        kinds = {self.waits[one].operation.kind if one in self.waits else "" for one in culprits}
        return CIRCLE if len(kinds) > 1 else SENDS if mine.kind == SEND else RECEIVES

    def find_stray(self, rank: int, other: int, message: Operation) -> tuple[int, ...] | None:
        """The group of a message between the two ranks that also lacks its other part, with another tag or group."""
        kind = MIRRORED[message.kind]
        for channel, count in self.states[other].counts.items():
            _, group, _, tag = channel
            if channel[0] == kind and channel[2] in (rank, None) and (group, tag) != (message.group, message.tag):
                peers = (other, None) if kind == SEND else (other,)
                if count > sum(self.count(rank, message.kind, group, peer, tag) for peer in peers):
                    return group
        return None

    def explain(self, held: Iterable[int], blocked: set[int], proved: bool) -> Diagnosis:
        """Why these ranks are blocked."""
        culprits = self.find_culprits(held, blocked)
        stuck = blocked | self.finished
        edges = [
            (rank, one) for rank in blocked for one in self.waits[rank].absent & stuck | self.waits[rank].differing
        ]
        edges = [edge for edge in edges if culprits & {*edge}] or edges
        kinds = {edge: self.classify(*edge, culprits) for edge in edges}
        rank, other = min(kinds, key=lambda edge: (KINDS.index(kinds[edge]), edge[1] not in culprits, edge[::-1]))
        return self.describe(kinds[rank, other], culprits, other, rank, proved)

    def find_late(self) -> Diagnosis | None:
        """Nobody is blocked for good: who comes last, if anybody waits, is stopped or dead."""
        awaited = set[int]().union(*(wait.missing for wait in self.waits.values()))
        for doing, kind in ((DEAD, LOST), (STOPPED, SUSPENDED), (IN_PROGRAM, STRAGGLER), (NOT_SEEN, UNSEEN)):
            late = self.ranks_doing(doing)
            if awaited or doing == IN_PROGRAM:
                late &= awaited
            if late:
                other = min(late, key=lambda rank: (-self.states[rank].since, rank))
                waiting = [rank for rank, wait in self.waits.items() if other in wait.missing]
                return self.describe(kind, late, other, min(waiting, default=None))
        return self.describe(RUNNING, set(), min(self.waits)) if self.waits else None

    def describe(
        self, kind: str, culprits: set[int], other: int, rank: int | None = None, proved: bool = False
    ) -> Diagnosis:
        """`rank` waits for `other`, which is the culprit or one of them."""
        disputed = self.waits[rank].operation if rank is not None and kind in DIFFERENCES else None
        acts = {one: self.find_act(one, kind, disputed) for one in self.states}
        alike = [one for one in sorted(self.states) if acts[one] == acts[other] and one in (culprits or self.waits)]
        parties = [(alike or [other], acts[other])]
        if rank is not None:
            waiting = [one for one in sorted(self.waits) if other in self.waits[one].missing and one not in alike]
            parties.append(([one for one in waiting if acts[one] == acts[rank]] or [rank], acts[rank]))
        rows = {one: self.list_cells(one) for one in sorted(self.states)}
        since = {one: state.since for one, state in self.states.items() if state.doing != NOT_SEEN}
        return compose(kind, culprits, parties, draw_table(rows, since), proved)

    def find_act(self, rank: int, kind: str, disputed: Operation | None) -> Act:
        """What a rank does; or, in the place of this operation, has called."""
        state, wait = self.states[rank], self.waits.get(rank)
        called = self.meet(disputed).get(rank) if disputed and rank in disputed.group else None
        if called and not (wait and is_at(wait.operation, called.channel, called.index)):
            return Act(f"has called {detail(called, kind)}", called.line, called.name)
        if wait:
            return Act(f"is in {detail(wait.operation, kind)}", wait.operation.line, wait.operation.name)
        last = state.operations[-1].line if state.operations and state.doing == FINISHED else ""
        return Act(ACTS.get(state.doing) or state.end or "is dead", state.line or last, "")

    def list_cells(self, rank: int) -> tuple[str, str, str]:
        """What a rank does, where, and whom it waits for."""
        state, wait = self.states[rank], self.waits.get(rank)
        if wait is None:
            return (state.end if state.doing == DEAD else "") or state.doing, state.line, ""
        doing = f"{detail(wait.operation, WRONG_TAG if wait.operation.tag else ROOTS)} #{wait.operation.index}"
        return doing, wait.operation.line, "any of " * wait.any_one * bool(wait.missing) + format_ranks(wait.missing)


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """Who waits for whom, and why. None if no rank waits in an operation, is stopped or dead.

    What has to be known of all ranks at the same moment: a deadlock is proved by states between which no rank moved.
    """
    calls = Calls(states)
    firm = [
        rank
        for rank, wait in calls.waits.items()
        if not calls.states[rank].has_other_threads | wait.operation.may_give_up
    ]
    everyone = list(calls.waits)
    for judge, held in ((calls, firm), (calls, everyone), (Calls(states, pessimistic=True), everyone)):
        if blocked := judge.find_blocked(held, set()):
            return judge.explain(held, blocked, proved=held is firm)
    return calls.find_late()


def describe(states: Sequence[RankState]) -> str:
    """The diagnosis or, if no rank waits, what each does."""
    rows = {state.rank: (state.end or state.doing, state.line, "") for state in states}
    return str(diagnose(states) or f"no rank waits\n{draw_table(rows, {state.rank: state.since for state in states})}")


def find_mismatch(states: Sequence[RankState]) -> Diagnosis | None:
    """The first operation, as far as they are known, that ranks called differently, although it may have worked."""
    calls = Calls(states)
    meetings: dict[tuple[object, ...], dict[int, Operation]] = {}
    for rank, state in calls.states.items():
        for one in list_known(state):
            key: tuple[object, ...] = one.channel, one.index
            if one.kind != COLLECTIVE:
                sender, receiver = (rank, one.peer) if one.kind == SEND else (one.peer, rank)
                if calls.count(receiver, RECEIVE, one.group, None, one.tag):
                    continue  # a receive from anyone may have taken any of them
                key = sender, receiver, one.group, one.tag, one.index
            meetings.setdefault(key, {})[rank] = one
    for met in sorted(meetings.values(), key=lambda met: min(one.issued for one in met.values())):
        culprits = find_minority(met, lambda one, other: find_difference(one, other, strictly=True))
        if culprits:
            other = min(culprits)
            rank = next(one for one in met if find_difference(met[one], met[other], strictly=True))
            kind = find_difference(met[rank], met[other], strictly=True)
            acts = {one: Act(f"has called {detail(call, kind)}", call.line, call.name) for one, call in met.items()}
            parties = [([one for one in sorted(met) if acts[one] == acts[some]], acts[some]) for some in (other, rank)]
            rows = {one: (detail(call, kind), call.line, "") for one, call in sorted(met.items())}
            return compose(kind, culprits, parties, draw_table(rows, {}), False)
    return None


def list_known(state: RankState) -> Iterator[Operation]:
    """The operations of a rank that are known, the latest first; one may be twice there."""
    if state.waits_for:
        yield state.waits_for
    yield from reversed(state.operations)


def is_at(operation: Operation, channel: Channel, index: int) -> bool:
    return operation.index == index and operation.channel == channel


def is_elsewhere(one: Operation, other: Operation) -> bool:
    return not is_at(one, other.channel, other.index) or bool(find_difference(one, other))


def find_family(name: str) -> str:
    """The collective that a function does: all_gather_into_tensor is an all_gather."""
    return re.sub("(_into)?_tensor$|_single$|_coalesced$", "", name)


def find_difference(one: Operation, other: Operation | None, strictly: bool = False) -> str:
    """The kind of difference between two operations that should be the same, or the parts of a message; empty if there is
    none, or if it does no harm and that is not `strictly` looked at."""
    if other is None:
        return ""
    sizes = [prod(part.shape) * find_width(part.dtype) for part in (one, other)]
    if one.kind != COLLECTIVE:
        return SIZES if sizes[0] != sizes[1] else DTYPES if one.dtype != other.dtype else ""
    if find_family(one.name) != find_family(other.name):
        return COLLECTIVES
    if one.peer != other.peer:
        return ROOTS
    comparable = one.name == other.name and one.name in EQUAL_SHAPES
    if comparable and sizes[0] != sizes[1] and prod(one.shape) != prod(other.shape):
        return SHAPES
    if one.dtype != other.dtype and (strictly or (comparable and sizes[0] != sizes[1])):
        return DTYPES
    return ""


def find_width(dtype: str) -> int:
    """Bytes of an element; 1 if it is not known."""
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def find_minority(
    operations: Mapping[int, Operation | None], differ: Callable[[Operation, Operation], object] = find_difference
) -> set[int]:
    """The ranks whose operations differ from those of most; all, if there is no majority."""
    parties: list[tuple[Operation, set[int]]] = []
    for rank, operation in operations.items():
        if operation:
            same = next((ranks for one, ranks in parties if not differ(one, operation)), None)
            if same is None:
                parties.append((operation, {rank}))
            else:
                same.add(rank)
    parties.sort(key=lambda party: len(party[1]))
    if len(parties) < 2:
        return set()
    tie = len(parties[-1][1]) == len(parties[-2][1])
    return set[int]().union(*(ranks for _, ranks in (parties if tie else parties[:-1])))


def detail(operation: Operation, kind: str) -> str:
    """An operation, with what matters for this kind of diagnosis."""
    name, peer, shape = operation.name, operation.peer, list(operation.shape)
    if operation.kind != COLLECTIVE:
        name += " to " if operation.kind == SEND else " from "
        name += "anyone" if peer is None else f"rank {peer}"
    elif peer is not None and kind == ROOTS:
        name += f" {'to' if find_family(name) in TO_ROOT else 'from'} rank {peer}"
    more = {
        SHAPES: f" of shape {shape}",
        DTYPES: f" of {operation.dtype}",
        SIZES: f" of {operation.dtype}{shape}",
        GROUPS: f" of the group {format_ranks(operation.group)}",
        WRONG_TAG: f" with tag {operation.tag}",
    }
    return name + more.get(kind, "")


def compose(
    kind: str, culprits: set[int], parties: Sequence[tuple[Sequence[int], Act]], table: str, proved: bool
) -> Diagnosis:
    """A diagnosis of what one party does, and another that waits for it, if there is one."""
    (ranks, act), *others = parties
    sentence = ("deadlock: " if proved else "") + act.tell(ranks)
    for more, other in others:
        link = ("where" if proved or "called" in act.phrase else "while") + " "
        sentence += f" {link}{other.tell(more, act.line)}"
    return Diagnosis(
        kind=kind,
        culprits=tuple(sorted(culprits)),
        operation=next((some.operation for _, some in parties if some.operation), ""),
        line=act.line,
        proved=proved,
        sentence=textwrap.fill(sentence, WIDTH),
        table=table,
        cure=CURES[kind],
    )


def draw_table(rows: Mapping[int, tuple[str, str, str]], since: Mapping[int, float]) -> str:
    """A table of what ranks do, where, and whom they wait for; and since when. Ranks that do the same share a row."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, cells in rows.items():
        alike.setdefault(cells, []).append(rank)
    lines = [("rank", "does", "since", "where", "waits for")]
    for (doing, where, awaited), ranks in alike.items():
        longest = max((since[rank] for rank in ranks if rank in since), default=None)
        lines.append((format_ranks(ranks), doing, "" if longest is None else f"{longest:.1f} s", where, awaited))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for column, most in ((0, 12), (4, 16), (1, 28)):  # as far as there is no room
        widths[column] = max(min(widths[column], most), widths[column] - max(0, sum(widths) + 8 - WIDTH))
    widths[3] = min(widths[3], WIDTH - 8 - sum(widths) + widths[3])
    return "\n".join(
        "  ".join(shorten(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def shorten(text: str, width: int) -> str:
    """A line of a program loses its function first."""
    if len(text) > width:
        text = re.sub(r"(:\d+) in .*", r"\1", text)
    return text if len(text) <= width else text[: width - 1] + "…"


def format_ranks(ranks: Iterable[int]) -> str:
    """0-2, 5"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
