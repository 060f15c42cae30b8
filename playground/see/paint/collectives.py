"""Figures of messages and collectives: what every rank holds before and after, and what moved between.

Of our own algorithms and of send and receive every message is recorded, and drawn solid. What a backend sends inside
its collectives cannot be seen: that is drawn dashed, as it is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import cos, hypot, pi, sin
from typing import Any

from playground.measurement.units import format_bytes
from playground.see.analyse.messages import Message, to_logical_time
from playground.see.analyse.timeline import ref_of
from playground.see.paint.results import Change, Evidence, Held, SgdStep, last_step
from playground.see.paint.rows import Cell, Move, Panel, Row, add_panels
from playground.see.paint.scene import ALPHA, ARROW, BOX, CELL, TEXT, WIDTH, Drawing, Scene
from playground.see.paint.timeline import format_values, lay_out, message_title

DASHED = "Dashed: what is meant to move; inside a collective of the backend it cannot be seen."


def numbers(values: Held) -> str:
    """What a rank holds, short; the same number many times, once."""
    if not values:
        return "-"
    return f"{values[0]:g}" if len({*values}) == 1 else " ".join(f"{value:g}" for value in values)


def cells(held: Sequence[Held], style: str = "plain", styles: dict[int, str] | None = None) -> list[Cell]:
    """A box for each rank, with what it holds."""
    return [
        Cell(text=f"rank {rank}\n{numbers(values)}", style=(styles or {}).get(rank, style))
        for rank, values in enumerate(held)
    ]


def all_reduce_sum(run: Evidence) -> Scene:
    """F6: every rank has a tensor, and then every rank has the sum of all."""
    changes: Sequence[dict[str, Change]] = run.results
    own = [each["all_reduce"] for each in changes]
    ranks = range(len(own))
    terms = " + ".join(f"t{rank}" for rank in ranks)
    total = numbers(own[0].after)
    before = [Cell(text=f"rank {rank}\nt{rank} = {numbers(change.before)}") for rank, change in enumerate(own)]
    after = [Cell(text=f"rank {rank}\nT = {numbers(change.after)}", style="value") for rank, change in enumerate(own)]
    rows = [
        Row(label="before", cells=before),
        Row(
            label="",
            cells=[Cell(text=f"T = {terms} = {total}", meant=True)],
            moves=[Move(source=rank, target=0, meant=True) for rank in ranks],
        ),
        Row(label="after", cells=after, moves=[Move(source=0, target=rank, meant=True) for rank in ranks]),
    ]
    drawing = Drawing("All-reduce: the same sum on every rank")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    return drawing.scene(f"dist.all_reduce on {len(own)} ranks: values before and after are those of the run.", DASHED)


def six_collectives(run: Evidence) -> Scene:
    """F21: the six collectives that every tutorial has."""
    changes: Sequence[dict[str, Change]] = run.results
    drawing = Drawing("Six collectives: what each rank holds before and after")
    add_panels(drawing, [collective_panel(name, [each[name] for each in changes]) for name in changes[0]], columns=2)
    return drawing.scene(f"dist.* on {len(changes)} ranks: values before and after are those of the run.", DASHED)


def collective_panel(name: str, changes: Sequence[Change]) -> Panel:
    """One of them: who has something to give is above, who has got something below."""
    ranks = range(len(changes))
    sources = [0] if name in ("scatter", "broadcast") else [*ranks]
    targets = [0] if name in ("gather", "reduce") else [*ranks]
    below = [change.after if rank in targets else () for rank, change in enumerate(changes)]
    moves = [Move(source=source, target=target, meant=True) for source in sources for target in targets]
    return Panel(
        title=name,
        rows=[
            Row(label="", cells=cells([change.before for change in changes])),
            Row(label="", cells=cells(below, "value", {r: "idle" for r in ranks if r not in targets}), moves=moves),
        ],
    )


def move_of(message: Message, text: str = "") -> Move:
    """The arrow of a message that was recorded."""
    send, receive = message.send, message.receive
    return Move(
        source=send.rank, target=receive.rank, text=text, title=message_title(message), start=send.start,
        end=receive.end, event=ref_of(send),
    )  # fmt: skip


def reduce_broadcast(run: Evidence) -> Scene:
    """F7: all send to a root, which adds up and sends the sum to all."""
    changes: Sequence[Change] = run.results
    messages = run.messages
    root = messages[0].receive.rank
    to_root = [message for message in messages if message.receive.rank == root]
    from_root = [message for message in messages if message.send.rank == root]
    total = from_root[0].send.values or ()
    middle = [total if rank == root else change.before for rank, change in enumerate(changes)]
    rows = [
        Row(label="before", cells=cells([change.before for change in changes])),
        Row(label="reduced", cells=cells(middle, styles={root: "value"}), moves=[move_of(each) for each in to_root]),
        Row(
            label="after",
            cells=cells([change.after for change in changes], "value"),
            moves=[move_of(each) for each in from_root],
        ),
    ]
    drawing = Drawing("All-reduce as reduce, then broadcast")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    sent, received = (sum(each.send.nbytes for each in every) for every in (from_root, to_root))
    return drawing.scene(
        f"{len(messages)} messages, recorded. Rank {root} receives {format_bytes(received)} and sends "
        f"{format_bytes(sent)}: all of it.",
        f"Every other rank sends {format_bytes(to_root[0].send.nbytes)}: the root's link is the limit.",
    )


def all_to_all(run: Evidence) -> Scene:
    """F8: everybody sends everything to everybody."""
    changes: Sequence[Change] = run.results
    messages = run.messages
    size = len(changes)
    rows = [
        Row(label="before", cells=cells([change.before for change in changes])),
        Row(
            label="after",
            cells=cells([change.after for change in changes], "value"),
            moves=[move_of(each) for each in messages],
        ),
    ]
    drawing = Drawing("All-reduce as all to all")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    nbytes = sum(message.send.nbytes for message in messages)
    return drawing.scene(
        f"{len(messages)} messages, recorded: N(N - 1) = {size} x {size - 1} = {size * (size - 1)}.",
        f"{format_bytes(nbytes)} in all, of tensors of {format_bytes(messages[0].send.nbytes)}.",
    )


def ring_chunk(run: Evidence) -> Scene:
    """F9: one chunk goes round: on its way it is added up, then its sum is passed on."""
    changes: Sequence[Change] = run.results
    size = len(changes)
    hops = hops_of_chunk(run.messages)
    drawing = Drawing(f"Ring all-reduce: the way of one chunk, in {len(hops)} hops")
    places = [place(rank, size) for rank in range(size)]
    for number, hop in enumerate(hops, 1):
        add_hop(drawing, number, hop, places, is_collected=number < size)
    for rank, (x, y) in enumerate(places):
        text = f"rank {rank}\n{numbers(changes[rank].before)} > {numbers(changes[rank].after)}"
        drawing.add(BOX, x - RING_BOX[0] / 2, y - RING_BOX[1] / 2, *RING_BOX, style="value", text=text)
    drawing.add(TEXT, WIDTH / 2, RING_MIDDLE - CELL[1] / 2, text="collected, outside", style="chunk")
    drawing.add(TEXT, WIDTH / 2, RING_MIDDLE + CELL[1] / 2, text="passed on, inside", style="message")
    scene = drawing.scene(
        f"Recorded messages: {len(hops)} = 2(N - 1) hops of {format_bytes(hops[0].send.nbytes)}; the number after each "
        "hop is what travels.",
        f"The other {size - 1} chunks do the same at the same time, one rank further on each.",
    )
    return replace(scene, takes_turns=True)


RING_MIDDLE = 160.0
"""Pixels from the top."""
RING_RADII = (200.0, 120.0)
"""Of the box that four ranks are the corners of: half its width and height."""
CORNER = sin(pi / 4)
RING_BOX = (112.0, 64.0)


def place(rank: int, size: int) -> tuple[float, float]:
    """The middle of a rank's box, clockwise; of four, rank 0 is in the upper left corner."""
    angle = 2 * pi * (rank - 0.5) / size
    return WIDTH / 2 + RING_RADII[0] * sin(angle) / CORNER, RING_MIDDLE - RING_RADII[1] * cos(angle) / CORNER


def hops_of_chunk(messages: Sequence[Message]) -> list[Message]:
    """The messages that carry the chunk which rank 0 is the first to send, in order."""
    first = next(message.send for message in messages if message.send.rank == 0)
    return [message for message in messages if message.send.offset == first.offset]


def add_hop(
    drawing: Drawing, number: int, hop: Message, places: Sequence[tuple[float, float]], *, is_collected: bool
) -> None:
    """The arrow of a hop, outside the ring or inside, with its number and what travels."""
    (x, y), (to_x, to_y) = places[hop.send.rank], places[hop.receive.rank]
    length = hypot(to_x - x, to_y - y)
    across, down = (to_x - x) / length, (to_y - y) / length
    aside = CELL[1] if is_collected else -CELL[1]
    cut = (RING_BOX[0] * abs(across) + RING_BOX[1] * abs(down)) / 2 + 4
    x, y = x + across * cut + down * aside, y + down * cut - across * aside
    drawing.add(
        ARROW, x, y, across * (length - 2 * cut), down * (length - 2 * cut),
        style="chunk" if is_collected else "message", text=f"{number}: {numbers(hop.send.values or ())}",
        title=f"hop {number}: {message_title(hop)}", start=hop.send.start, end=hop.receive.end,
        event=ref_of(hop.send), label_at=0.35 if is_collected else 0.65,
    )  # fmt: skip


def step_everywhere(run: Evidence) -> Scene:
    """F10: all ranks take the same step, so that all have the same weights."""
    steps: Sequence[SgdStep] = run.results
    ranks = range(len(steps))
    mean = steps[0].average
    rows = [
        Row(label="own", cells=[Cell(text=f"rank {r}\ng {steps[r].gradient:+.5f}", style="backward") for r in ranks]),
        Row(
            label="mean",
            cells=[Cell(text=f"g {mean:+.5f}", style="communication", meant=True)],
            moves=[Move(source=rank, target=0, meant=True) for rank in ranks],
        ),
        Row(
            label="step",
            cells=[Cell(text=f"w {step.weight:+.5f}\n-> {step.new_weight:+.5f}", style="optimizer") for step in steps],
            moves=[Move(source=0, target=rank, meant=True) for rank in ranks],
        ),
    ]
    drawing = Drawing(f"The end of the ring: w = w - {ALPHA} g, the same everywhere")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    difference = max(step.replicas_max_difference for step in steps)
    return drawing.scene(
        f"One weight of {steps[0].parameters:,}, {ALPHA} = {steps[0].lr:g}, "
        f"{sum(step.samples for step in steps)} samples on {len(steps)} ranks.",
        f"After the step the replicas' parameters differ by {difference:g} at most.",
        DASHED,
    )


def point_to_point(run: Evidence) -> Scene:
    """F20: one rank sends, one receives, and the others have no part in it."""
    changes: Sequence[Change] = run.results
    messages = run.messages
    taking_part = {rank for each in messages for rank in (each.send.rank, each.receive.rank)}
    idle = {rank: "idle" for rank in range(len(changes)) if rank not in taking_part}
    label = format_values(messages[0].send.values or ())
    rows = [
        Row(label="before", cells=cells([change.before for change in changes], styles=idle)),
        Row(
            label="after",
            cells=cells([change.after for change in changes], "value", idle),
            moves=[move_of(each, label) for each in messages],
        ),
    ]
    drawing = Drawing("Point to point: one rank sends, another receives")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    others = " and ".join(str(rank) for rank in idle)
    send = messages[0].send
    return drawing.scene(
        f"{len(messages)} message of {format_bytes(send.nbytes)}, recorded: rank {send.rank} to rank {send.peer}. "
        f"Ranks {others} have no part in it."
    )


def one_world(run: Evidence) -> Scene:
    """hello: processes that know nothing of each other meet at the master, and then all have heard from all."""
    ranks: Sequence[Mapping[str, Any]] = run.results
    all_meet = [Move(source=rank, target=0, meant=True) for rank in range(len(ranks))]
    all_know = [Move(source=0, target=rank, meant=True) for rank in range(len(ranks))]
    met = [
        Cell(text=f"rank {each['rank']}\nheard from\n{numbers(tuple(each['heard_from']))}", style="value")
        for each in ranks
    ]
    rows = [
        Row(label="processes", cells=[Cell(text=f"pid {each['pid']}") for each in ranks]),
        Row(label="the master", cells=[Cell(text="rank 0's store", meant=True)], moves=all_meet),
        Row(label="one world", cells=met, moves=all_know),
    ]
    drawing = Drawing("N processes become one world")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    return drawing.scene(
        f"{len(ranks)} processes on {ranks[0]['backend']}: who each is, and whom it has heard from, as it says itself.",
        "Dashed: each writes down where it can be reached, and reads the same of the others; that is not recorded.",
    )


def ring(run: Evidence) -> Scene:
    """see: what is painted of any run, here in logical steps."""
    recording = to_logical_time(last_step(run.recorded))
    return lay_out(recording, "A ring all-reduce, as it was recorded, in logical steps", unit="step")
