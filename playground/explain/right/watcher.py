"""In a rank: what its watchers have in common. They see what the program does, and write it into
the rank's log.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from playground.base.event_log import NONE, EventLog, Table, map_file
from playground.base.upstream import hide_from_compiler, local_of
from playground.explain.lines import Lines
from playground.explain.right.log import (
    FORMAT,
    FULL,
    LINE,
    OPTIMIZER,
    STATE,
    STEP,
    THREADS,
    UNKNOWN,
)
from playground.tap import Call, Observer, observing

MOST_TENSORS = 8
"""How many tensors of a batch are looked at."""
FIRST_CALLS = 1000
"""The first calls are looked at; of later ones, those that say something of a training."""


class RankLog(EventLog):
    """The log of a rank. Where it cannot be written, the program runs without."""

    def __init__(self, file: Path) -> None:
        super().__init__(FORMAT, map_file(file, FORMAT.size))
        self.lines = Table(self, LINE)
        self.optimizers = Table(self, OPTIMIZER)

    def write_to(self, memory: Any) -> None:
        super().write_to(memory)
        self.state = self.octets[FORMAT.words_at : FORMAT.text_at].cast("q")

    def tell(self, subject: str, *thing: object) -> None:
        """Write a line, unless an earlier one had no room: what is there ends at one moment."""
        if not (self.state[FULL] or self.write(subject, thing)):
            self.state[FULL] = 1

    def add_step(self, optimizer: int, clock: int) -> None:
        number = self.take_number()
        STEP.pack_into(self.octets, FORMAT.place_of(number), optimizer, clock, number + 1)


class Notes:
    """What a rank's watchers write down together."""

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.thread = threading.get_ident()
        self.is_watching = True
        self.has_threads = False
        """Whether another thread has done what is seen of the main one."""
        self.lines = Lines()
        self.known_lines: list[Any] = []
        self.count_steps: Callable[[], dict[int, int]] = dict
        """How many steps each optimizer has made, by its number; none before `count_steps_by`."""
        self.on_step: list[Callable[[bool], None]] = []
        """Who wants to know that an optimizer has made a step, and whether an optimizer's next step
        is looked at."""

    def count_steps_by(self, count_steps: Callable[[], dict[int, int]]) -> None:
        """From now on, whoever watches the optimizers counts their steps."""
        self.count_steps = count_steps

    @property
    def step(self) -> int:
        """How many steps the optimizer with the most has made."""
        return max(self.count_steps().values(), default=0)

    def give_up(self, why: str) -> None:
        """Nothing is known of this rank from now on."""
        self.is_watching = False
        self.log.tell(UNKNOWN, why)

    def write_line(self) -> int:
        """The line of the program that has caused this."""
        return self.line_of(self.lines.find_cause())

    def line_of(self, number: int) -> int:
        """A line as the log has it, by its number in this rank."""
        if number == NONE:
            return NONE
        if number >= len(self.known_lines):
            self.known_lines = [*self.lines.lines]
        return self.log.lines[self.known_lines[number]]

    def finish(self, state: int) -> None:
        """The program has ended so."""
        self.is_watching = False
        self.log.state[STATE] = state


class Watcher(Observer):
    """Sees some of what the tap tells."""

    looks_at_calls = False

    def __init__(self, notes: Notes) -> None:
        self.notes = notes


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method that sees what the main thread of the rank does, and never raises. What others do
    is not seen."""

    @wraps(method)
    def watch(self: Watcher, *args: Any) -> None:
        notes = self.notes
        if torch.compiler.is_compiling() or not notes.is_watching:
            return
        try:
            if threading.get_ident() == notes.thread:
                method(self, *args)
            elif not notes.has_threads:
                notes.has_threads = True
                notes.log.tell(THREADS)
        except Exception as error:  # whatever a program makes of torch's objects
            notes.give_up(f"{type(error).__name__} in the check: {error}")

    return hide_from_compiler(watch, with_calls=True)


class SeesCalls(Watcher):
    """Sees calls: the first ones, and later ones once an optimizer steps. Where they are not seen,
    the tap costs nothing."""

    looks_at_calls = True
    in_all_steps = False
    """Whether later ones are seen in all steps, or in those alone that are looked at."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        self.seen = 0
        """How many calls were."""
        self.goes_on = False
        """Whether later ones are looked at."""
        self.place = contextlib.ExitStack()
        self.is_in_place = False
        notes.on_step.append(self.step_made)

    def begin(self) -> None:
        if not self.is_in_place:
            self.place.enter_context(observing(self))
            self.is_in_place = True

    def end(self) -> None:
        self.place.close()
        self.is_in_place = False

    def done(self, calls: Sequence[Call]) -> None:
        self.seen += len(calls)
        if self.seen < FIRST_CALLS or self.goes_on or not self.is_in_place:
            return
        if threading.get_ident() == self.notes.thread:  # and no thread of the backend's
            self.end()

    def step_made(self, is_next_looked_at: bool) -> None:
        """An optimizer has made a step."""
        self.goes_on = self.in_all_steps or is_next_looked_at
        if self.goes_on:
            self.begin()


def tensors_in(value: Any) -> list[Tensor]:
    """The first tensors of a batch: of tuples, lists and dictionaries within each other."""
    found: list[Tensor] = []
    waiting = [value]
    while waiting and len(found) < MOST_TENSORS:
        each = waiting.pop(0)
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            waiting[:0] = each[:MOST_TENSORS]
        elif isinstance(each, dict):
            waiting[:0] = [*each.values()][:MOST_TENSORS]
    return found


def describe_shard(tensor: Any) -> tuple[bool, tuple[int, ...]] | None:
    """Whether a DTensor is divided among ranks, and which ranks hold the same part as this one.
    None of another tensor, of partial sums, and where this rank holds nothing."""
    if local_of(tensor) is None or (at := tensor.device_mesh.get_coordinate()) is None:
        return None
    mesh, placements = tensor.device_mesh.mesh, tensor.placements
    if any(each.is_partial() for each in placements):
        return None
    places = zip(placements, at, strict=True)
    same = mesh[tuple(slice(None) if each.is_replicate() else own for each, own in places)]
    return same.numel() < mesh.numel(), tuple(same.flatten().tolist())


def is_whole(tensor: Any) -> bool:
    """Whether its version counts the writes to it alone: it is plain, and all of its storage."""
    return (
        address_of(tensor) != 0
        and not tensor.is_inference()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def address_of(tensor: Any) -> int:
    """That of its storage; 0 if it has none of its own."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
