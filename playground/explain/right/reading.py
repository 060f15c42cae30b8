"""Reads what ranks have written into their logs. Does not import torch."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from playground.base.event_log import BEGUN, USED, LogReader, read_lines
from playground.base.untrusted import expect_dict, expect_int, expect_list, expect_text
from playground.explain.hang.sources import Line
from playground.explain.right.facts import (
    Batch,
    Draw,
    Event,
    FileUse,
    Late,
    Layout,
    Look,
    Misuse,
    Model,
    Optimizer,
    Overwritten,
    RankFacts,
    Rates,
    Samples,
    Shares,
)
from playground.explain.right.log import (
    BATCH,
    CALLS,
    DRAW,
    FILE,
    FINAL,
    FORMAT,
    LATE,
    LAYOUT,
    LINE,
    LOOK,
    MESSAGES,
    MISUSE,
    MODEL,
    OPTIMIZER,
    OVERWRITTEN,
    RATES,
    RESTORED,
    RUNNING,
    SAMPLES,
    SHARES,
    STEP,
    THREADS,
    UNKNOWN,
    UNOWNED,
    file_name,
)

PLAIN: Mapping[str, tuple[str, Callable[..., object]]] = {
    MODEL: ("models", Model),
    LATE: ("late", Late),
    BATCH: ("batches", Batch),
    SHARES: ("shares", Shares),
    SAMPLES: ("samples", Samples),
    FILE: ("files", FileUse),
    MISUSE: ("misuses", Misuse),
    LAYOUT: ("layouts", Layout),
    OVERWRITTEN: ("overwritten", Overwritten),
    RATES: ("rates", Rates),
    UNOWNED: ("unowned", expect_text),
}
"""By the subject of a line: where its fields go as they are, and what they make."""


def read_ranks(folder: Path, size: int) -> list[RankFacts]:
    """What ranks have left in a folder, in rank order."""
    return [read_rank(folder / file_name(rank), rank) for rank in range(size)]


def count_written(log: Path) -> int:
    """How much a rank has written: grows whenever it writes. 0 before it has begun."""
    try:
        header = LogReader(os.open(log, os.O_RDONLY), FORMAT).read_header()
    except (OSError, ValueError, struct.error):
        return 0
    return header[BEGUN] + header[USED]


def has_ended(log: Path) -> bool:
    """Whether the program of a rank has ended."""
    try:
        words = LogReader(os.open(log, os.O_RDONLY), FORMAT).read_words()
        state, *_ = struct.unpack_from("<q", words)
    except (OSError, ValueError, struct.error):
        return False
    return bool(state != RUNNING)


def read_rank(log: Path, rank: int) -> RankFacts:
    try:
        reader = LogReader(os.open(log, os.O_RDONLY), FORMAT)
        return read_facts(reader, rank)
    except OSError:
        return RankFacts(rank, RUNNING, "it has not begun")
    except (ValueError, TypeError, LookupError, struct.error):
        return RankFacts(rank, RUNNING, "its log cannot be read")


def read_facts(reader: LogReader, rank: int) -> RankFacts:
    """Raises `ValueError`, `TypeError`, `LookupError` or `struct.error` for what no rank writes."""
    state, full, races = struct.unpack_from("<3q", reader.read_words())
    facts = RankFacts(rank, RUNNING if full else state, is_full=bool(full), races=races)
    optimizers: list[Optimizer] = []
    for subject, thing in read_lines(reader.read_text()):
        fields = expect_list(thing)
        if subject == UNKNOWN:
            unknown = expect_text(fields[0])
            return RankFacts(rank, state, unknown, is_full=bool(full), races=races)
        if subject == BATCH and not fields:
            facts = replace(facts, has_loader=True)
        elif subject == THREADS:
            facts = replace(facts, has_threads=True)
        elif subject == RESTORED:
            facts = replace(facts, has_restored=True)
        elif subject == MESSAGES:
            facts = replace(facts, has_messages=True)
        elif subject == CALLS:
            facts = replace(facts, has_calls=True)
        else:
            add_fact(facts, optimizers, subject, fields)
    begun = reader.read_header()[BEGUN]  # before the others, as the rank goes on
    numbers = range(reader.count_records())
    for record in reader.read_records(numbers).values():
        number, clock, _ = STEP.unpack(record)
        facts.steps.setdefault(number, []).append(clock)
    return replace(facts, has_all_steps=begun <= len(numbers))


def add_fact(
    facts: RankFacts, optimizers: list[Optimizer], subject: str, fields: Sequence[object]
) -> None:
    """Add what a line says; `optimizers` are those that lines before it have told of."""
    if subject in PLAIN:
        name, make = PLAIN[subject]
        getattr(facts, name).append(make(*fields))
    elif subject == LINE:
        facts.lines.append(read_line(fields))
    elif subject == OPTIMIZER:
        optimizers.append(Optimizer(*fields))  # type: ignore[arg-type]
    elif subject == LOOK:
        facts.looks.append(read_look(optimizers, fields))
    elif subject == FINAL:
        for each in fields:
            parameter, found = expect_list(each)
            facts.final[expect_text(parameter)] = None if found is None else expect_int(found)
    elif subject == DRAW:
        *plain, steps, at = fields
        counts = dict(map(read_pair, expect_list(steps)))
        facts.draws.append(Draw(*plain, counts, at))  # type: ignore[call-arg, arg-type]


def read_line(fields: Sequence[object]) -> Line:
    file, line, function, path = fields
    return expect_text(file), expect_int(line), expect_text(function), expect_text(path)


def read_pair(thing: object) -> tuple[int, int]:
    first, second = expect_list(thing)
    return expect_int(first), expect_int(second)


def read_look(optimizers: Sequence[Optimizer], fields: Sequence[object]) -> Look:
    number, told = fields
    look = Look(optimizers[expect_int(number)], **expect_dict(told))  # type: ignore[arg-type]
    events = [Event(*expect_list(each)) for each in look.events]  # type: ignore[arg-type]
    look.events[:] = events
    return look
