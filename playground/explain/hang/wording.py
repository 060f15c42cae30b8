"""A diagnosis, and its words: a sentence, the table of what ranks do, and the fix."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from playground.base.ranks import format_ranks, group_alike, name_ranks
from playground.base.wrapping import WIDTH, wrap_sentence
from playground.explain.hang.states import (
    COLLECTIVE,
    OF_DDP,
    REDUCTIONS,
    SEND,
    Doing,
    Kind,
    Operation,
)
from playground.explain.hang.wait_graph import TO_ROOT, WaitGraph

ACTS = {
    Doing.FINISHED: ("has finished", "have finished"),
    Doing.STOPPED: ("is stopped", "are stopped"),
    Doing.IN_PROGRAM: ("is in the program", "are in the program"),
    Doing.NOT_SEEN: ("is not seen", "are not seen"),
}
"""The verbs for one rank that is in no operation, and for several."""
ABORT = "SIGABRT"
"""In the words on a rank's end: by a backend that has got what it did not expect, most likely."""
UNLIKE = Kind.SHAPES, Kind.DTYPES
"""Kinds of difference in which every rank may have another value: all are told."""
MOST_PARTIES = 8
"""Most parties that a sentence tells of."""
WIDTHS = 12, 26, 7, 17, 10
"""Columns: the most of each cell of a table if there is no room for more."""


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

    raised: str = ""
    """Which ranks had raised what, if they wait in `finally` or `except`."""
    traceback: str = ""
    """That of the first exception."""

    def __str__(self) -> str:
        raised = [wrap_sentence(self.raised)] if self.raised else []
        first = [textwrap.fill(f"before that: {self.difference}", WIDTH)] if self.difference else []
        unknown = [textwrap.fill(f"not known: {self.unknown}", WIDTH)] if self.unknown else []
        cure = textwrap.fill(self.cure, WIDTH)
        below = [f"what had been raised:\n{self.traceback}"] if self.traceback else []
        return "\n".join((*raised, self.sentence, *first, self.table, *unknown, cure, *below))


@dataclass(frozen=True, slots=True)
class Predicate:
    """A verb with its object, for one rank."""

    one: str
    """Said of one rank: "is in barrier"."""
    several: str
    line: str
    operation: str = ""
    is_over: bool = False
    about_line: str = ""
    """What stands before the line: "its last call: all_reduce, "."""

    def say(self, ranks: Sequence[int], before: str = "") -> str:
        """The sentence about these ranks. A line in the same file as the line `before` is told
        without the file."""
        place = shorten(self.line.partition(" in ")[0], 24)
        file, _, number = place.rpartition(":")
        place = f":{number}" if file and before.startswith(f"{file}:") else place
        sentence = f"{shorten(name_ranks(ranks), 22)} {self.several if ranks[1:] else self.one}"
        return f"{sentence} ({self.about_line}{place})" if place else sentence


HAS_NOT = Predicate("has not", "have not", "")


def has_called(operation: Operation, kind: Kind, more: str = "") -> Predicate:
    what = detail(operation, kind) + more
    return Predicate(
        f"has called {what}", f"have called {what}", operation.line, operation.name, is_over=True
    )


def draw_last(graph: WaitGraph) -> str:
    """The table of what each rank has called last, which it may not have come out of."""
    rows = {}
    for rank, state in sorted(graph.states.items()):
        rows[rank] = list_cells(graph, rank)
        last = next((one for one in reversed(state.operations) if not one.raised), None)
        if last and rank not in graph.waits and state.doing != Doing.FINISHED:
            rows[rank] = f"{detail(last, Kind.ROOTS)} #{last.index}", last.line, ""
    return draw_table(rows, {})


def draw_states(graph: WaitGraph, with_unseen: bool = False) -> str:
    """A table of the states of all ranks that are seen, or of all that there are."""
    seen = sorted(graph.states.keys() - graph.find_doing(Doing.NOT_SEEN))
    rows = {one: list_cells(graph, one) for one in (sorted(graph.states) if with_unseen else seen)}
    return draw_table(rows, {one: graph.states[one].since for one in seen})


def list_cells(graph: WaitGraph, rank: int) -> tuple[str, str, str]:
    """A rank's state, its line, and the ranks that it waits for."""
    state, wait = graph.states[rank], graph.waits.get(rank)
    if wait is None:
        doing = "waits for a worker" if state.worker else state.doing
        return (state.doing == Doing.DEAD and state.end) or doing, state.line, ""
    told = (
        Kind.WRONG_TAG if wait.operation.kind != COLLECTIVE and wait.operation.tag else Kind.ROOTS
    )
    # short enough for its column, so that the tag is not cut
    doing = f"{detail(wait.operation, told)} #{wait.operation.index}".replace(" with tag", ", tag")
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
        Kind.GROUPS: f" of {name_group(operation)} (ranks {format_ranks(operation.group)})",
        Kind.WRONG_TAG: f" with tag {operation.tag}",
        Kind.MODELS: f" of model {operation.tag}" if name in OF_DDP and operation.tag > 0 else "",
    }
    return name + more.get(kind, "")


def name_group(operation: Operation) -> str:
    return f"group {operation.number}" if operation.number else "the default group"


def compose(
    kind: Kind, culprits: Iterable[int], parties: Sequence[tuple[Sequence[int], Predicate]],
    table: str,
    unknown: str | None,
) -> Diagnosis:  # fmt: skip
    """A diagnosis of what one party does, and of another that waits for it, if there is one, and
    more if all differ. `unknown` is what a proof lacks; None if nobody is blocked."""
    act = parties[0][1]
    sentence = join_parties(
        parties, " while " if unknown is None and not act.is_over else " where "
    )
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
        sentence=wrap_sentence(sentence),
        table=table,
        cure=kind.cure,
    )


def join_parties(parties: Sequence[tuple[Sequence[int], Predicate]], between: str) -> str:
    """What parties do, with a word between the first and the others."""
    act = parties[0][1]
    first, *others = (
        some.say(ranks, act.line if some is not act else "") for ranks, some in parties if ranks
    )
    return between.join([first, *([" and ".join(others)] if others else [])])


def name_caller(place: str, caller: str) -> str:
    """A place with the line that has called its function: "eval.py:39, called in main :71". `place`
    begins with its file, `caller` is as "eval.py:71 in main"."""
    line, _, function = caller.partition(" in ")
    file, _, number = line.rpartition(":")
    by = f":{number}" if os.path.basename(place).startswith(f"{file}:") else line
    return f"{place}, called in {function} {by}"


def draw_table(rows: Mapping[int, tuple[str, str, str]], since: Mapping[int, float]) -> str:
    """States of ranks, their lines, whom they wait for, and since when. Ranks that do the same
    share a row."""
    lines = [("rank", "does", "since", "where", "waits for")]
    for (doing, where, awaited), ranks in group_alike(rows).items():
        longest = max((since[rank] for rank in ranks if rank in since), default=None)
        seconds = "" if longest is None else f"{longest:.{1 if longest < 1000 else 0}f} s"
        lines.append((format_ranks(ranks), doing, seconds, where, awaited))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = WIDTH - 2 * (len(widths) - 1)
    for column in (4, 0, 3, 1):
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
