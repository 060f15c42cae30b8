"""Is it right? Silent mistakes of a program's training: it raises nothing, and its result is not
the one that was meant. Does not import torch.

Each rank writes what it sees of its optimizers, models and calls into a log of its own, which is
there after the rank was killed. The ranks' logs are compared when the program has ended. Ranks call
nothing for this. A finding names the ranks, the step, the line, why, and what to do. What the rules
need and nobody has seen is unknown, and an unknown is never a finding.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from playground.runtime.event_log import BEGUN, Format, LogReader, read_lines
from playground.runtime.flight_recorder.sources import Line
from playground.runtime.untrusted import expect_int, expect_list, expect_text

STATE, FULL = range(2)
"""The log's words: how the program ended, and whether there was no room for all that was seen."""
RUNNING, ENDED, FAILED = range(3)
"""Values of `STATE`."""
STEP = struct.Struct("<qqq")
"""A step of an optimizer: the optimizer's number, its clock, and the mark."""
FORMAT = Format(
    title=b"plgright", record=STEP, mark=struct.Struct("<16xq"), capacity=2**15, words=2,
    text=2**21,
)  # fmt: skip
LINE, OPTIMIZER, MODEL, LATE, LOOK, FINAL, DRAW, BATCH, MISUSE, THREADS, UNKNOWN = (
    "line", "optimizer", "model", "late", "look", "final", "draw", "batch", "misuse", "threads",
    "unknown",
)  # fmt: skip
"""Subjects of the lines of a log's text."""
FIRST_STEPS = 12
"""The first steps of each optimizer are looked at, then those whose number is a power of two, and
their successors."""
NO_GRADIENT = 0
"""In the place of a gradient's fingerprint."""
Prints = list[int | None]
"""Fingerprints, one for each parameter of an optimizer; None is unknown."""


def file_name(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank-{rank}.right"


def is_looked_at(step: int) -> bool:
    """Whether the step of this number is looked at: of n steps, about 10 + 2·log₂ n. Pairs tell
    what a step has changed from what was changed after it."""
    return step < FIRST_STEPS or step & (step - 1) == 0 or (step - 1) & (step - 2) == 0


@dataclass(frozen=True)
class Model:
    """A model that was wrapped by DistributedDataParallel."""

    key: str
    """Its group, by name, and its number among those of the group: the same on all ranks."""
    ranks: list[int]
    """Those of its group."""
    names: list[str]
    """The names of its parameters, without those that DistributedDataParallel is told to
    ignore."""
    trained: list[bool]
    """Whether each requires a gradient."""
    prints: Prints
    line: int


@dataclass(frozen=True)
class Late:
    """A parameter that a forward pass finds in a model, and that was not there when the model was
    wrapped."""

    model: str
    name: str
    line: int


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its parameters."""

    number: int
    """By its first step among those of its rank."""
    kind: str
    """Its class, with the module."""
    parameters: list[str]
    """`MODEL/NAME` of a wrapped model's, else the optimizer's number and the parameter's."""
    sizes: list[int]
    """Numbers of their elements."""
    ranks: list[int]
    """Those of the group whose clock its looks have."""


JOINS = "joins"
"""The note of a forward pass in the context of `Join`."""
FORWARD, BACKWARD, LOADED, CALLED, BUCKET = "forward", "backward", "loaded", "called", "bucket"


@dataclass(frozen=True)
class Event:
    """What happened between two steps of an optimizer."""

    kind: str
    """FORWARD of a wrapped model in training, BACKWARD, LOADED, CALLED, or BUCKET: gradients that
    DistributedDataParallel is about to average."""
    subject: str
    """The model's key; of a call, the operation's name."""
    flag: bool
    """FORWARD: whether the backward pass is to average the gradients. BACKWARD: whether the clock
    of a wrapped model advanced in it. CALLED: whether it was in a backward pass."""
    note: str
    """FORWARD: the communication hook, if there is one that is not torch's or that does not average
    at each step, and `JOINS`."""
    gradients: list[int]
    """CALLED: the numbers of the optimizer's parameters whose gradients the call took."""
    parameters: list[int]
    """CALLED: those of the parameters that it took. LOADED: those that were loaded."""
    size: int
    """CALLED: the number of elements."""
    ranks: int
    """CALLED: the size of the group."""
    line: int
    prints: Prints
    """FORWARD: fingerprints of the inputs. BUCKET: that of the gradients, before the average. Empty
    if nobody has looked."""


@dataclass(frozen=True)
class Look:
    """A step of an optimizer that was looked at."""

    optimizer: Optimizer
    step: int
    """Its number among the optimizer's, from 0 on."""
    clock: int
    """How many collectives the group has started before it; -1 if the group does not tell."""
    nth: int
    """Its number among the optimizer's steps at this clock."""
    before: Prints
    gradients: Prints
    """Just before the step."""
    after: Prints
    raw: Prints
    """The gradients at the end of the last backward pass; empty if they were not looked at."""
    values: list[list[float]]
    """Two elements of each of the first parameters, before the step."""
    settings: list[list[str]]
    """The hyperparameters of each group of parameters, as `name=value`."""
    events: list[Event]
    """Those since the optimizer's last step; empty if there were too many."""
    is_whole: bool
    """Whether `events` has all of them."""
    in_backward: bool
    has_closure: bool
    """Whether the step calls a closure, or steps another optimizer."""
    has_hooks: bool
    """Whether hooks of the optimizer itself are called after the step."""
    wrapped: list[str]
    """The keys of the wrapped models that are alive."""
    line: int

    @property
    def moment(self) -> tuple[int, int]:
        """Looks of several ranks with one moment were made between the same collectives."""
        return self.clock, self.nth


@dataclass(frozen=True)
class Draw:
    """An iteration over a `DistributedSampler`."""

    sampler: int
    """By its first draw among those of its rank."""
    number: int
    """Among the draws of its sampler, from 0 on."""
    rank: int
    parts: int
    """The sampler's `num_replicas`."""
    seed: int
    epoch: int
    shuffles: bool
    length: int
    """The number of samples in the data set."""
    clock: int
    """The world's, -1 if it is not known."""
    steps: dict[int, int]
    """How many steps each optimizer had made."""
    line: int


@dataclass(frozen=True)
class Batch:
    """One of the first batches of an iteration of a data loader over a `DistributedSampler`."""

    sampler: int
    draw: int
    number: int
    prints: Prints


GAPS, WRITTEN = "gaps", "written"


@dataclass(frozen=True)
class Misuse:
    """A tensor that a call cannot take so."""

    kind: str
    """GAPS: it has gaps in memory, and gloo goes through the memory as if it had none. WRITTEN: the
    program has written it before it waited for the call."""
    operation: str
    line: int
    """That of the call."""
    step: int
    """How many steps the optimizer with the most had made."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank has seen."""

    rank: int
    state: int
    """RUNNING if it was killed."""
    unknown: str = ""
    """Why nothing can be said of this rank; empty if that is not so."""
    lines: list[Line] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    final: dict[str, int | None] = field(default_factory=dict)
    """Fingerprints of parameters when the program had ended, by their names in optimizers."""
    steps: dict[int, list[int]] = field(default_factory=dict)
    """The clocks of all steps of an optimizer, by its number."""
    draws: list[Draw] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    misuses: list[Misuse] = field(default_factory=list)
    has_loader: bool = False
    """Whether a data loader has returned batches."""
    has_all_steps: bool = True
    """Whether `steps` has all of them."""
    has_threads: bool = False
    """Whether other threads than the main one communicate, step or run backward passes."""

    def where(self, line: int) -> str:
        """A line as it is told; empty if it is not known."""
        if not 0 <= line < len(self.lines):
            return ""
        file, number, _, _ = self.lines[line]
        return f"{os.path.basename(file)}:{number}"


@dataclass(frozen=True)
class Finding:
    """A silent mistake."""

    rule: str
    """The name of the rule that found it."""
    is_certain: bool
    """Whether no right program does this. Else it is a hint: a program may do so on purpose."""
    what: str
    ranks: tuple[int, ...]
    since: int
    """The number of the optimizer's step at which it was first seen, from 0 on."""
    where: str
    """The line; empty if there is none."""
    why: str
    fix: str


def read_ranks(folder: Path, size: int) -> list[RankFacts]:
    """What ranks have left in a folder, in rank order."""
    return [read_rank(folder / file_name(rank), rank) for rank in range(size)]


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
    state, full, *_ = struct.unpack_from("<2q", reader.read_words())
    facts = RankFacts(rank, state, "its log is full" if full else "")
    optimizers: list[Optimizer] = []
    has_threads = has_loader = False
    for subject, thing in read_lines(reader.read_text()):
        fields = expect_list(thing)
        if subject == LINE:
            file, line, function, path = fields
            facts.lines.append(
                (expect_text(file), expect_int(line), expect_text(function), expect_text(path))
            )
        elif subject == OPTIMIZER:
            optimizers.append(Optimizer(*fields))  # type: ignore[arg-type]
        elif subject == MODEL:
            facts.models.append(Model(*fields))  # type: ignore[arg-type]
        elif subject == LATE:
            facts.late.append(Late(*fields))  # type: ignore[arg-type]
        elif subject == LOOK:
            facts.looks.append(read_look(optimizers, fields))
        elif subject == FINAL:
            for each in fields:
                name, found = expect_list(each)
                facts.final[expect_text(name)] = None if found is None else expect_int(found)
        elif subject == UNKNOWN:
            return RankFacts(rank, state, expect_text(fields[0]))
        elif subject == DRAW:
            *plain, steps, line = fields
            counts = {}
            for each in expect_list(steps):
                number, count = expect_list(each)
                counts[expect_int(number)] = expect_int(count)
            facts.draws.append(Draw(*plain, counts, line))  # type: ignore[call-arg, arg-type]
        elif subject == BATCH and fields:
            facts.batches.append(Batch(*fields))  # type: ignore[arg-type]
        elif subject == BATCH:
            has_loader = True
        elif subject == MISUSE:
            facts.misuses.append(Misuse(*fields))  # type: ignore[arg-type]
        elif subject == THREADS:
            has_threads = True
    numbers = range(reader.count_records())
    for record in reader.read_records(numbers).values():
        number, clock, _ = STEP.unpack(record)
        facts.steps.setdefault(number, []).append(clock)
    has_all = reader.read_header()[BEGUN] <= len(numbers)
    return replace(facts, has_all_steps=has_all, has_threads=has_threads, has_loader=has_loader)


def read_look(optimizers: Sequence[Optimizer], fields: Sequence[object]) -> Look:
    number, *rest = fields
    look = Look(optimizers[expect_int(number)], *rest)  # type: ignore[arg-type]
    events = [Event(*expect_list(each)) for each in look.events]  # type: ignore[arg-type]
    look.events[:] = events
    return look
