"""Figures of messages and collectives: what every rank holds before and after, and the messages between.

Messages of send and receive and of our own algorithms are recorded, and drawn solid. The messages inside a backend's
collectives cannot be seen: they are drawn dashed, as they are meant. One figure moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import Any

import playground.see.paint as paint
from playground.measurement import format_bytes
from playground.see.analyse import Message, Vector, changes_of, match_messages, ref_of, to_logical_time
from playground.see.paint import CELL, Cell, Drawing, Move, Panel, Row, Scene, meant_moves, panels_drawing, rows_scene
from playground.see.paint.results import Change, Evidence, SgdStep, last_step
from playground.see.paint.timeline import format_values, lay_out, message_title
from playground.see.record import COMPUTE, PHASE

DASHED = "Dashed: what is meant to move; inside a collective of the backend it cannot be seen."


def numbers(values: Vector | None) -> str:
    """A rank's numbers; equal ones are written once."""
    if not values:
        return "-"
    return f"{values[0]:g}" if len({*values}) == 1 else " ".join(f"{value:g}" for value in values)


def cells(held: Iterable[Vector], style: str = "plain", styles: Mapping[int, str] | None = None) -> list[Cell]:
    """A box for each rank, with its numbers; `styles` are those of single ranks."""
    styles = styles or {}
    return [Cell(f"rank {rank}\n{numbers(each)}", styles.get(rank, style)) for rank, each in enumerate(held)]


def cells_before(changes: Sequence[Change], styles: Mapping[int, str] | None = None) -> list[Cell]:
    return cells((change.before for change in changes), styles=styles)


def cells_after(changes: Sequence[Change], styles: Mapping[int, str] | None = None) -> list[Cell]:
    return cells((change.after for change in changes), "value", styles)


def moves_of(messages: Iterable[Message], text: str = "") -> list[Move]:
    """The arrows of recorded messages."""
    ends = ((each, each.send.rank, each.receive.rank) for each in messages)
    return [Move(source, target, text, message_title(each), event=ref_of(each.send)) for each, source, target in ends]


def all_reduce_sum(run: Evidence) -> Scene:
    """F6: all-reduce: the same sum on every rank."""
    own: Sequence[Change] = [each["all_reduce"] for each in run.results]
    ranks = range(len(own))
    terms = " + ".join(f"t{rank}" for rank in ranks)
    before = [Cell(f"rank {rank}\nt{rank} = {numbers(change.before)}") for rank, change in enumerate(own)]
    after = [Cell(f"rank {rank}\nT = {numbers(change.after)}", "value") for rank, change in enumerate(own)]
    total = Row([Cell(f"T = {terms} = {numbers(own[0].after)}", meant=True)], meant_moves(ranks, [0]))
    rows = [Row(before, label="before"), total, Row(after, meant_moves([0], ranks), "after")]
    about = f"dist.all_reduce on {len(own)} ranks: values before and after are those of the run."
    return rows_scene("All-reduce: the same sum on every rank", rows, about, DASHED)


def six_collectives(run: Evidence) -> Scene:
    """F21: six collectives: before and after."""
    changes: Sequence[dict[str, Change]] = run.results
    panels = [collective_panel(name, [each[name] for each in changes]) for name in changes[0]]
    drawing = panels_drawing("Six collectives: what each rank holds before and after", panels, columns=2)
    return drawing.scene(f"dist.* on {len(changes)} ranks: values before and after are those of the run.", DASHED)


def collective_panel(name: str, changes: Sequence[Change]) -> Panel:
    """One of them: the ranks that give above, the ranks that receive below."""
    ranks = range(len(changes))
    sources = [0] if name in ("scatter", "broadcast") else ranks
    targets = [0] if name in ("gather", "reduce") else ranks
    below = [change.after if rank in targets else () for rank, change in enumerate(changes)]
    idle = {rank: "idle" for rank in ranks if rank not in targets}
    return Panel(name, [Row(cells_before(changes)), Row(cells(below, "value", idle), meant_moves(sources, targets))])


def reduce_broadcast(run: Evidence) -> Scene:
    """F7: all-reduce as reduce, then broadcast."""
    changes: Sequence[Change] = run.results
    messages = run.messages
    root = messages[0].receive.rank
    to_root = [message for message in messages if message.receive.rank == root]
    from_root = [message for message in messages if message.send.rank == root]
    total = from_root[0].send.values or ()
    reduced = [total if rank == root else change.before for rank, change in enumerate(changes)]
    rows = [
        Row(cells_before(changes), label="before"),
        Row(cells(reduced, styles={root: "value"}), moves_of(to_root), "reduced"),
        Row(cells_after(changes), moves_of(from_root), "after"),
    ]
    sent, received = (format_bytes(sum(each.send.nbytes for each in every)) for every in (from_root, to_root))
    about = f"{len(messages)} messages, recorded. Rank {root} receives {received} and sends {sent}: all of it."
    limit = f"Every other rank sends {format_bytes(to_root[0].send.nbytes)}: the root's link is the limit."
    return rows_scene("All-reduce as reduce, then broadcast", rows, about, limit)


def all_to_all(run: Evidence) -> Scene:
    """F8: all-reduce as all to all."""
    changes: Sequence[Change] = run.results
    messages, size = run.messages, len(changes)
    sizes = [message.send.nbytes for message in messages]
    rows = [Row(cells_before(changes), label="before"), Row(cells_after(changes), moves_of(messages), "after")]
    total, each = (format_bytes(nbytes) for nbytes in (sum(sizes), sizes[0]))
    about = f"{len(messages)} messages, recorded: N(N - 1) = {size} x {size - 1} = {size * (size - 1)}."
    return rows_scene("All-reduce as all to all", rows, about, f"{total} in all, of tensors of {each}.")


RING_MIDDLE = 160.0
"""Pixels from the top."""
RING_RADII = (200.0, 120.0)
"""Half the width and height of the rectangle whose corners are four ranks."""
RING_BOX = (112.0, 64.0)


def ring_chunk(run: Evidence) -> Scene:
    """F9: ring all-reduce: the way of one chunk."""
    changes: Sequence[Change] = run.results
    size = len(changes)
    first = next(message.send for message in run.messages if message.send.rank == 0)
    hops = [message for message in run.messages if message.send.offset == first.offset]
    drawing = Drawing(f"Ring all-reduce: the way of one chunk, in {len(hops)} hops")
    places = [place(rank, size) for rank in range(size)]
    for number, hop in enumerate(hops, 1):
        add_hop(drawing, number, hop, places, is_collected=number < size)
    for rank, (x, y) in enumerate(places):
        text = f"rank {rank}\n{numbers(changes[rank].before)} > {numbers(changes[rank].after)}"
        drawing.add(paint.BOX, x - RING_BOX[0] / 2, y - RING_BOX[1] / 2, *RING_BOX, style="value", text=text)
    drawing.add(paint.TEXT, paint.WIDTH / 2, RING_MIDDLE - CELL[1] / 2, text="collected, outside", style="chunk")
    drawing.add(paint.TEXT, paint.WIDTH / 2, RING_MIDDLE + CELL[1] / 2, text="passed on, inside", style="message")
    scene = drawing.scene(
        f"Recorded messages: {len(hops)} = 2(N - 1) hops of {format_bytes(hops[0].send.nbytes)}; the number after each "
        "hop is what travels.",
        f"The other {size - 1} chunks do the same at the same time, one rank further on each.",
    )
    return replace(scene, takes_turns=True)


def place(rank: int, size: int) -> tuple[float, float]:
    """The middle of a rank's box. Ranks go round clockwise; rank 0 of four is in the upper left corner."""
    angle, corner = 2 * pi * (rank - 0.5) / size, sin(pi / 4)
    return paint.WIDTH / 2 + RING_RADII[0] * sin(angle) / corner, RING_MIDDLE - RING_RADII[1] * cos(angle) / corner


def add_hop(
    drawing: Drawing, number: int, hop: Message, places: Sequence[tuple[float, float]], *, is_collected: bool
) -> None:
    """Add the arrow of a hop, outside the ring or inside, with its number and the values it carries."""
    (x, y), (to_x, to_y) = places[hop.send.rank], places[hop.receive.rank]
    length = hypot(to_x - x, to_y - y)
    across, down = (to_x - x) / length, (to_y - y) / length
    aside = CELL[1] if is_collected else -CELL[1]
    cut = (RING_BOX[0] * abs(across) + RING_BOX[1] * abs(down)) / 2 + 4
    x, y, length = x + across * cut + down * aside, y + down * cut - across * aside, length - 2 * cut
    style, label_at = ("chunk", 0.35) if is_collected else ("message", 0.65)
    words = {"text": f"{number}: {numbers(hop.send.values)}", "title": f"hop {number}: {message_title(hop)}"}
    look = {"style": style, "label_at": label_at, "event": ref_of(hop.send)}
    drawing.add(paint.ARROW, x, y, across * length, down * length, **words, **look)


def step_everywhere(run: Evidence) -> Scene:
    """F10: the end of an all-reduce: the same step everywhere."""
    steps: Sequence[SgdStep] = run.results
    ranks = range(len(steps))
    weights = [Cell(f"w {step.weight:+.5f}\n-> {step.new_weight:+.5f}", "optimizer") for step in steps]
    mean = Cell(f"g {steps[0].average:+.5f}", "communication", meant=True)
    own = [Cell(f"rank {rank}\ng {step.gradient:+.5f}", "backward") for rank, step in enumerate(steps)]
    to_all = Row(weights, meant_moves([0], ranks), "step")
    difference = max(step.replicas_max_difference for step in steps)
    return rows_scene(
        f"The end of the ring: w = w - {paint.ALPHA} g, the same everywhere",
        [Row(own, label="own"), Row([mean], meant_moves(ranks, [0]), "mean"), to_all],
        f"One weight of {steps[0].parameters:,}, {paint.ALPHA} = {steps[0].lr:g}, "
        f"{sum(step.samples for step in steps)} samples on {len(steps)} ranks.",
        f"After the step the replicas' parameters differ by {difference:g} at most.",
        DASHED,
    )


def point_to_point(run: Evidence) -> Scene:
    """F20: point to point: one rank sends, another receives."""
    changes: Sequence[Change] = run.results
    messages = run.messages
    taking_part = {rank for each in messages for rank in (each.send.rank, each.receive.rank)}
    idle = {rank: "idle" for rank in range(len(changes)) if rank not in taking_part}
    send = messages[0].send
    after = Row(cells_after(changes, idle), moves_of(messages, format_values(send.values or ())), "after")
    return rows_scene(
        "Point to point: one rank sends, another receives",
        [Row(cells_before(changes, idle), label="before"), after],
        f"{len(messages)} message of {format_bytes(send.nbytes)}, recorded: rank {send.rank} to rank {send.peer}. "
        f"Ranks {' and '.join(map(str, idle))} have no part in it.",
    )


def one_world(run: Evidence) -> Scene:
    """hello: processes meet at the master, and are one world."""
    ranks: Sequence[Mapping[str, Any]] = run.results
    everyone = range(len(ranks))
    met = [Cell(f"rank {each['rank']}\nheard from\n{numbers(tuple(each['heard_from']))}", "value") for each in ranks]
    rows = [
        Row([Cell(f"pid {each['pid']}") for each in ranks], label="processes"),
        Row([Cell("rank 0's store", meant=True)], meant_moves(everyone, [0]), "the master"),
        Row(met, meant_moves([0], everyone), "one world"),
    ]
    return rows_scene(
        "N processes become one world",
        rows,
        f"{len(ranks)} processes on {ranks[0]['backend']}: who each is, and whom it has heard from, as it says itself.",
        "Dashed: each writes down where it can be reached, and reads the same of the others; that is not recorded.",
    )


def ring(run: Evidence) -> Scene:
    """see: a recorded ring all-reduce: ranks, waits and messages."""
    recording = to_logical_time(last_step(run.recorded))
    return lay_out(recording, "A ring all-reduce, as it was recorded, in logical steps", unit="step")


SECONDS_PER_STEP = 1.1
"""Seconds that a logical step takes in the moving picture."""
PAUSE = 3.0
"""Seconds before it begins again."""
CHUNK = (40.0, 32.0)
"""Width and height of the box of one number."""


def moving(run: Evidence) -> Scene:
    """moving: a ring all-reduce that moves: messages on their way, and their sums."""
    recording = to_logical_time(last_step(run.recorded))
    held = [[*changes_of(rank)] for rank in recording.ranks]
    corners = [corner_of(rank, recording.size, len(held[0][0].values)) for rank in range(recording.size)]
    drawing = Drawing(f"A ring all-reduce on {recording.size} ranks, message by message")
    for rank, (x, y), changes in zip(recording.ranks, corners, held, strict=True):
        drawing.add(paint.TEXT, x, y - CELL[1], text=f"rank {rank.rank}", align="start")
        add_numbers(drawing, x, y, [(change.time, change.values) for change in changes])
        for event in rank.events:
            if event.kind == COMPUTE and event.offset is not None:
                look = {"style": "optimizer", "title": event.name, "event": ref_of(event)}
                add_number(drawing, x + event.offset * CHUNK[0], y, "+", event.start, event.end, **look)
    messages = match_messages(recording).matched
    for message in messages:
        send, receive = message.send, message.receive
        (x, y), (to_x, to_y) = corners[send.rank], corners[receive.rank]
        look = {"style": "communication", "title": message_title(message), "event": ref_of(send)}
        left, values = x + (send.offset or 0) * CHUNK[0], " ".join(f"{value:g}" for value in send.values or ())
        add_number(drawing, left, y, values, send.start, receive.end, travels=(to_x - x, to_y - y), **look)
    phases = [(event.name, event.start, event.end) for event in recording.ranks[0].events if event.kind == PHASE]
    y = drawing.bottom + 1.5 * CELL[1]
    for name, start, end in (*phases, ("done: every rank has the same sums", recording.end, paint.FOREVER)):
        drawing.add(paint.TEXT, paint.WIDTH / 2, y, text=name, style="message", **shown(start, end))
    scene = drawing.scene(
        f"Recorded: {len(messages)} messages. Each rank adds what arrives, until it has one whole sum "
        "(reduce-scatter). Then the sums go round (all-gather)."
    )
    return replace(scene, period=round(recording.end * SECONDS_PER_STEP, 3) + PAUSE)


def corner_of(rank: int, size: int, count: int) -> tuple[float, float]:
    """The upper left corner of a rank's `count` numbers. The first half of the ranks is in the upper row, to the right,
    the others are in the lower one, to the left, so that the ring goes clockwise."""
    upper = (size + 1) // 2
    column, row = (rank, 0) if rank < upper else (size - 1 - rank, 1)
    return paint.WIDTH * (column + 0.5) / upper - count * CHUNK[0] / 2, 3 * CELL[1] + row * 5 * CHUNK[1]


def add_number(drawing: Drawing, x: float, y: float, text: str, start: float, end: float, **look: object) -> None:
    """Add the box of a number, which is there between two logical steps."""
    drawing.add(paint.BOX, x, y, CHUNK[0], CHUNK[1], text=text, **shown(start, end), **look)


def shown(start: float, end: float) -> dict[str, float]:
    """The seconds in which a mark is there, given in logical steps."""
    return {"start": round(start * SECONDS_PER_STEP, 3), "end": round(end * SECONDS_PER_STEP, 3)}


def add_numbers(drawing: Drawing, x: float, y: float, changes: Sequence[tuple[float, Vector]]) -> None:
    """Add a box for each number that a rank holds, from one change of it to the next."""
    began, last = changes[0][0], changes[-1][1]
    for number, at_end in enumerate(last):
        values = [(moment, held[number]) for moment, held in changes]
        new = [values[0], *(after for before, after in pairwise(values) if after[1] != before[1])]
        for (start, value), (end, _) in pairwise([*new, (paint.FOREVER, at_end)]):
            style = "value" if value == at_end else "plain" if start == began else "compute"
            add_number(drawing, x + number * CHUNK[0], y, f"{value:g}", start, end, style=style)
