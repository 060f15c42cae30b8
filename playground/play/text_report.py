"""How a cell ended, in words: equal values once, with their ranks. Does not import torch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from html import escape
from math import prod

from playground.base.ranks import format_ranks, group_alike, name_ranks
from playground.base.wrapping import WIDTH
from playground.explain.hang import MAKE_DDP, Doing, Kind, Operation
from playground.explain.hang.wait_graph import find_width
from playground.explain.hang.wording import Diagnosis
from playground.explain.right.report import tell as tell_mistake
from playground.play.world import Run
from playground.ui.tables import RANK_COLUMN, Table, numbers

MOST_LINES, MOST_OF_SEVERAL, MOST_CHARACTERS = 24, 4, 400
"""Limits of what is shown of a value: lines of one that all ranks have, lines of each of several,
and characters of a line. `%out` shows the rest."""


ADDRESS = re.compile(r"\[[\d.]+\]:\d+|0x[\da-f]+")
"""A socket's or an object's, by which alone the errors of ranks may differ."""


def label(ranks: Iterable[int]) -> str:
    """[0-2,5]"""
    return f"[{format_ranks(ranks).replace(', ', ',')}]"


def in_cells(text: str, keeps_columns: bool = False) -> str:
    """Lines of cells as one says them: "cell 3, line 1"."""

    def say(found: re.Match[str]) -> str:
        width = len(found[0]) if keeps_columns and found[3] else 0
        return f"cell {found[1]}, line {found[2]}".ljust(width)

    return re.sub(r"cell (\d+):(\d+)( in <module>)?", say, text)


def describe_values(run: Run, size: int) -> Iterator[str]:
    """Lines on what each rank returned."""
    values = {rank: one.value for rank, one in run.outcomes.items() if one.value is not None}
    width = len(label(range(size))) + 1
    texts = group_alike({rank: str(value) for rank, value in values.items()})
    most = MOST_LINES if len(texts) == 1 else MOST_OF_SEVERAL
    shown = {rank: cut(text, ranks[0], most) for text, ranks in texts.items() for rank in ranks}
    yield from by_rank(shown, width)


def values_in_html(run: Run) -> str:
    """The values of all ranks side by side, for a notebook; empty if text is as good."""
    if not any(one.html for one in run.outcomes.values()):
        return ""
    values = {rank: one for rank, one in run.outcomes.items() if one.html or one.value is not None}
    texts = group_alike({rank: one.html or str(one.value) for rank, one in values.items()})
    plain = {text: escape(cut(text, ranks[0], MOST_LINES)) for text, ranks in texts.items()}
    parts = (
        f'<figure style="margin:0"><figcaption>{label(ranks)}</figcaption>'
        f"{values[ranks[0]].html or f'<pre>{plain[text]}</pre>'}</figure>"
        for text, ranks in texts.items()
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{"".join(parts)}</div>'


def describe_end(run: Run, size: int) -> Iterator[str]:
    """Lines on what each rank raised, and on why it was ended."""
    width = len(label(range(size))) + 1
    errors = {
        rank: in_cells(one.error)
        for rank, one in run.outcomes.items()
        if one.error and rank not in run.freed and not (run.lost and one.is_lost_peer)
    }
    first = dict[str, str]()
    errors = {rank: first.setdefault(ADDRESS.sub("", text), text) for rank, text in errors.items()}
    yield from by_rank(errors, width)
    if run.hang:
        found = tell_raised(leave_out_idle(run.hang, run.on), errors)
        yield from explain(found, f"deadlock after {run.seconds:.1f} s: ")
    if run.differing:
        yield from explain(run.differing, "all have returned, but ")
    for mistake in run.mistakes:
        yield from in_cells(tell_mistake(mistake)).splitlines()
    if run.places:
        yield f"interrupted after {run.seconds:.1f} s:"
        yield from by_rank({rank: in_cells(at) for rank, at in run.places.items()}, width)
    for rank, reason in sorted(run.lost.items()):
        yield f"rank {rank} {reason}"
    if run.why_lost:
        yield from explain(run.why_lost, "before, ")
    for sentence in say_what_is_left(run, size):
        yield from fill(sentence)


def by_rank(texts: Mapping[int, str], width: int) -> Iterator[str]:
    """Each text once, behind the ranks that it is from."""
    for text, ranks in group_alike(texts).items():
        first, *rest = text.split("\n")
        yield label(ranks).ljust(width - 1) + f" {first}"
        yield from (f"{'':{width}}{line}" for line in rest)


def cut(text: str, rank: int, most: int) -> str:
    """The first lines, `most` at most."""
    short = "\n".join(line[:MOST_CHARACTERS] for line in text.split("\n")[:most])
    return short if short == text else f"{short} … (%out {rank} shows all)"


def leave_out_idle(found: Diagnosis, on: Collection[int]) -> Diagnosis:
    """The diagnosis of a cell whose ranks are `on`, where they wait for others."""
    if found.kind != Kind.ENDED or not {*found.culprits}.isdisjoint(on):
        return found
    rest = f"not run this cell (%on {','.join(map(str, sorted(on)))})"
    told = {"has": f"does {rest}", "have": f"do {rest}"}
    return tell_anew(found, told, "idle", "run the cell on the ranks that have to meet: %on all")


def tell_raised(found: Diagnosis, raised: Collection[int]) -> Diagnosis:
    """The diagnosis of a cell in which ranks have `raised` an error, where others wait for them
    alone."""
    if found.kind != Kind.ENDED or not {*found.culprits} <= {*raised}:
        return found
    told = {verb: f"{verb} raised an error" for verb in ("has", "have")}
    ranks = name_ranks(found.culprits)
    cure = f"mend the error of {ranks}, above: the others wait for {ranks}"
    return tell_anew(found, told, "raised", cure)


def tell_anew(found: Diagnosis, told: Mapping[str, str], does: str, cure: str) -> Diagnosis:
    """The diagnosis with other words where it says that ranks have finished: in the sentence, by
    its verb, and in the table; and with another cure."""
    sentence = " ".join(found.sentence.split())
    for verb, words in told.items():
        sentence = re.sub(rf"\b{verb} finished( \(.*?\))?", words, sentence)
    table = found.table.replace(Doing.FINISHED, does.ljust(len(Doing.FINISHED)))
    return replace(found, sentence=sentence, table=table, cure=cure)


def explain(found: Diagnosis, head: str) -> Iterator[str]:
    """A diagnosis as `break` prints it, with the cells' lines."""
    sentence = " ".join(found.sentence.split()).removeprefix("deadlock: ")
    sentence = in_cells(re.sub("(ha(s|ve) finished)", r"\1 the cell", sentence))
    sentence = re.sub(r"\(:(\d+)", r"(line \1", sentence)  # in the cell that was just named
    yield from textwrap.wrap(head + sentence, WIDTH, subsequent_indent="  ")
    if found.raised:
        yield from fill(in_cells(found.raised))
    if found.difference:
        yield from fill(in_cells(f"before that: {found.difference}"))
    yield from (f"  {line}" for line in in_cells(found.table, keeps_columns=True).splitlines())
    yield from fill(in_cells(f"fix: {found.cure}"))


def fill(text: str) -> list[str]:
    """A paragraph below a sentence."""
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def say_what_is_left(run: Run, size: int) -> Iterator[str]:
    """What is as it was, and what is not."""
    if run.lost:
        lost = name_ranks(run.lost)
        yield (
            f"New processes are in the places of {lost}: their variables are gone."
            if len(run.lost) > 1
            else f"A new process is in the place of {lost}: its variables are gone."
        )
    if (run.hang or run.lost or run.places) and len(run.lost) < size:
        others = "the others'" if run.lost else "their"
        but = ", but for tensors that a collective was writing" if run.operations else ""
        yield f"The ranks are free again; {others} variables are as they were{but}."
    if run.has_left:
        yield "The cell has destroyed the process group: the ranks have formed another one."
    if {*run.gone} - {MAKE_DDP}:
        yield "Groups made with new_group are gone: make them again."
    if MAKE_DDP in run.gone:
        yield "DistributedDataParallel models hold the group that is gone: wrap them again."


def bytes_of(operation: Operation) -> int:
    """The bytes of its tensor on this rank."""
    if not operation.dtype:
        return 0
    return prod(operation.shape) * find_width(operation.dtype)


def table_of_calls(run: Run) -> Table:
    """What each rank called in the cell, in order."""
    rows = [
        (
            rank,
            operation.name,
            in_cells(operation.line),
            bytes_of(operation),
            (operation.done - operation.issued) * 1000 if operation.done else None,
        )
        for rank, operations in sorted(run.operations.items())
        for operation in operations
    ]
    columns = numbers(("bytes", "", ","), ("ms", "", ".2f"))
    return Table(RANK_COLUMN, "call", "where", *columns, rows=rows)
