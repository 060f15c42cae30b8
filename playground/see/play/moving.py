"""A recorded all-reduce as a moving picture: each rank's numbers, and the messages on their way, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from playground.see.analyse import Message, match_messages, ref_of, to_logical_time
from playground.see.paint import BOX, CELL, FOREVER, TEXT, WIDTH, Drawing, Scene
from playground.see.paint.results import Evidence, last_step
from playground.see.paint.timeline import message_title
from playground.see.play import changes_of
from playground.see.record import COMPUTE, PHASE, RankRecording, Recording

SECONDS_PER_STEP = 1.1
"""Seconds that a logical step takes."""
PAUSE = 3.0
"""Seconds before it begins again."""
CHUNK = (40.0, 32.0)
"""Width and height of the box of one number."""
RANK_HEIGHT = 64.0


@dataclass(frozen=True)
class Stage:
    """The places of the ranks' numbers."""

    size: int
    numbers: int

    def corner(self, rank: int) -> tuple[float, float]:
        """The upper left corner of a rank's numbers: the first half of the ranks in the upper row, to the right, the
        others in the lower one, to the left, so that the ring goes clockwise."""
        upper = (self.size + 1) // 2
        column, row = (rank, 0) if rank < upper else (self.size - 1 - rank, 1)
        left = WIDTH * (column + 0.5) / upper - self.numbers * CHUNK[0] / 2
        return left, 2 * CELL[1] + row * 2.5 * RANK_HEIGHT

    def chunk(self, rank: int, number: int) -> tuple[float, float]:
        x, y = self.corner(rank)
        return x + number * CHUNK[0], y + CELL[1]


def moving(run: Evidence) -> Scene:
    """A ring all-reduce of as many numbers as there are ranks: the moving picture of the first page."""
    recording = to_logical_time(last_step(run.recorded))
    held = [[change.values for change in changes_of(rank)] for rank in recording.ranks]
    stage = Stage(recording.size, len(held[0][0]))
    drawing = Drawing(f"A ring all-reduce on {recording.size} ranks, message by message")
    for rank in recording.ranks:
        x, y = stage.corner(rank.rank)
        drawing.add(TEXT, x, y, text=f"rank {rank.rank}", align="start")
        add_numbers(drawing, stage, rank)
    messages = match_messages(recording).matched
    for message in messages:
        add_message(drawing, stage, message)
    y = drawing.bottom + 1.5 * CELL[1]
    for name, start, end in spans(recording):
        drawing.add(TEXT, WIDTH / 2, y, text=name, style="message", start=seconds(start), end=seconds(end))
    scene = drawing.scene(
        f"Recorded: {len(messages)} messages. Each rank adds what arrives, until it has one whole sum "
        "(reduce-scatter). Then the sums go round (all-gather).",
    )
    return replace(scene, period=seconds(recording.end) + PAUSE)


def seconds(step: float) -> float:
    return round(step * SECONDS_PER_STEP, 3)


def add_numbers(drawing: Drawing, stage: Stage, rank: RankRecording) -> None:
    """A box for each number, from one change to the next; and a plus while it is added to."""
    changes = [
        (change.event.end if change.at_end else change.event.start, change.values) for change in changes_of(rank)
    ]
    for number, last in enumerate(changes[-1][1]):
        values = [(moment, values[number]) for moment, values in changes]
        new = [values[0], *(after for before, after in pairwise(values) if after[1] != before[1])]
        x, y = stage.chunk(rank.rank, number)
        for (start, value), (end, _) in pairwise([*new, (FOREVER, last)]):
            style = "value" if value == last else "plain" if start == new[0][0] else "compute"
            drawing.add(
                BOX, x, y, *CHUNK, style=style, text=f"{value:g}", start=seconds(start),
                end=end if end == FOREVER else seconds(end),
            )  # fmt: skip
    for event in rank.events:
        if event.kind == COMPUTE and event.offset is not None:
            drawing.add(
                BOX, *stage.chunk(rank.rank, event.offset), *CHUNK, style="optimizer", text="+", title=event.name,
                start=seconds(event.start), end=seconds(event.end), event=ref_of(event),
            )  # fmt: skip


def add_message(drawing: Drawing, stage: Stage, message: Message) -> None:
    """A message on its way from its place on one rank to the same place on the other."""
    send, receive = message.send, message.receive
    x, y = stage.chunk(send.rank, send.offset or 0)
    to_x, to_y = stage.chunk(receive.rank, send.offset or 0)
    drawing.add(
        BOX, x, y, *CHUNK, style="communication", text=sent(send.values or ()), title=message_title(message),
        start=seconds(send.start), end=seconds(receive.end), travels=(to_x - x, to_y - y), event=ref_of(send),
    )  # fmt: skip


def sent(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def spans(recording: Recording) -> Iterator[tuple[str, float, float]]:
    """Each phase of rank 0, then the end: its name, and the steps from which and to which it lasts."""
    phases = [event for event in recording.ranks[0].events if event.kind == PHASE]
    for phase in phases:
        yield phase.name, phase.start, phase.end
    yield "done: every rank has the same sums", recording.end, FOREVER
