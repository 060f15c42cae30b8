"""Recordings of cells: in full, as `--see` makes them, of a cell under `%%see`; of any other, what
the flight recorders hold, which costs nothing: the calls and their times, but neither what tensors
held nor what was computed. Does not import torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from math import inf
from pathlib import Path

from playground.base.files import temporary_folder
from playground.base.untrusted import printable
from playground.explain.hang import COLLECTIVE, Operation
from playground.explain.replay.files import RENDERED, amount, check_ending, render
from playground.explain.replay.play.player import render_page
from playground.explain.replay.record.layout import RUN, START, TABLES, TEXT, Files
from playground.explain.replay.record.reading import NANOSECONDS, merge, read_tables
from playground.explain.replay.record.recording import Event, RankRecording, Recording, SourceLine
from playground.explain.replay.record.run import (
    RECORDED,
    Recorded,
    collect,
    describe_run,
    find_versions,
    standstill_of,
)
from playground.explain.replay.render.text_report import to_words
from playground.play import cells
from playground.play.cells import Outcome
from playground.play.text_report import bytes_of
from playground.play.world import Cell, PlayWorld, Run
from playground.world import backends

LINE = re.compile(r"(.+):(\d+) in (\S+)")
HEIGHT = 640
"""Height of a player in pixels."""
NOTHING = "no rank called an operation of a process group"


class Player:
    """Plays a recording in a file, or in place. Raises `UsageError` for a file of another kind."""

    def __init__(self, file: str) -> None:
        self.file = Path(file) if file else None
        if self.file:
            check_ending(self.file, RENDERED, "%see")
        self.html = ""
        """The page in a frame, which a notebook shows. It loads nothing."""

    def play(self, world: PlayWorld, run: Run, recording: Recording | None) -> str:
        """Write the file, if there is one. Returns in words what is to be seen. Raises `UsageError`
        if it cannot be written."""
        recording = recording or read_flight_recorders(world, run)
        if not any(recording.events()):
            return NOTHING
        if self.file:
            render(recording, self.file)
            return f"{printable(self.file.name)} shows {amount(recording)}"
        page = escape(render_page(recording))
        self.html = f'<iframe srcdoc="{page}" width="100%" height="{HEIGHT}"></iframe>'
        return to_words(recording)


def record_cell(
    world: PlayWorld,
    source: str,
    number: int,
    on: Sequence[int],
    how: Callable[..., Outcome],
) -> tuple[Run, Recording]:
    """Run a cell, as `how` does in a rank, and record it in full. Raises `UsageError` if no rank
    has begun it."""
    world.call(cells.load, RECORDED)  # or ranks would be late by that
    with temporary_folder("play") as folder:
        run = world.run_cell(source, number, on, Recorded(how, folder))
        files = collect(folder / "0")
    world.last = Cell(number, source, tuple(on), how)  # which %retry does not record
    texts = {f"{TEXT}{name}": text.encode() for name, text in world.texts.items()}
    about = describe_run(command_of(run), world.config.backend, world.size)
    recording = merge({**files, **texts, RUN: about.encode()})
    left = run.began + run.seconds - find_beginning(files)
    device = device_of(world)

    def correct(rank: RankRecording) -> RankRecording:
        if rank.rank not in on:
            return RankRecording(rank=rank.rank, device=device, events=())
        was_freed = rank.rank in run.freed
        events = (without_end(event, left) if was_freed else event for event in rank.events)
        return replace(rank, device=rank.device or device, events=tuple(events))

    ranks = tuple(map(correct, recording.ranks))
    return run, replace(recording, ranks=ranks, standstill=standstill_of(run.hang))


def find_beginning(files: Files) -> float:
    """When a recording begins, on the monotonic clock, in seconds."""
    tables = (read_tables(files[name]) for name in files if name.endswith(TABLES))
    return min(start["clock"] for each in tables for start in each[START]) / NANOSECONDS


def without_end(event: Event, left: float) -> Event:
    """What was over only because its rank was let go, at `left`, never was."""
    return replace(event, end=inf) if event.start < left < event.end else event


def command_of(run: Run) -> tuple[str, str]:
    return "play:", f"cell {run.number}"


def device_of(world: PlayWorld) -> str:
    return backends.get_backend(world.config.backend).device_type


def read_flight_recorders(world: PlayWorld, run: Run) -> Recording:
    """What the flight recorders held of a cell when it ended."""
    sources: dict[SourceLine, int] = {}

    def to_event(rank: int, number: int, operation: Operation) -> Event:
        found = LINE.fullmatch(operation.line)
        line = SourceLine(found[1], int(found[2]), found[3]) if found else None
        return Event(
            number=number,
            rank=rank,
            kind=operation.kind,
            name=operation.name,
            start=operation.issued - run.began,
            end=operation.done - run.began if operation.done else inf,
            peer=operation.peer,
            nbytes=bytes_of(operation),
            shape=operation.shape,
            group=operation.group,
            message=None if operation.kind == COLLECTIVE else operation.index,
            tag=operation.tag,
            source=sources.setdefault(line, len(sources)) if line else None,
        )

    ranks = []
    for rank in range(world.size):
        operations = enumerate(run.operations.get(rank, ()))
        events = tuple(to_event(rank, number, each) for number, each in operations)
        is_lost = rank in run.lost
        ranks.append(
            RankRecording(rank=rank, device=device_of(world), events=events, is_cut_off=is_lost)
        )
    return Recording(
        command=command_of(run),
        backend=world.config.backend,
        versions=find_versions(),
        began=time.time() - time.monotonic() + run.began,
        ranks=tuple(ranks),
        sources=tuple(sources),
        texts={Path(name).name: text for name, text in world.texts.items()},
        standstill=standstill_of(run.hang),
    )
