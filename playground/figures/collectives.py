"""Figures of messages and collectives: what every rank holds before and after, and the messages
between.

Messages of programs and of our own algorithms are recorded, and drawn solid. The messages inside a
backend's collectives cannot be seen: they are drawn dashed, as they are meant. One figure moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import cos, pi, sin
from typing import TYPE_CHECKING

from playground.explain.replay.analyse.holdings import HeldValues, Vector, holdings_of
from playground.explain.replay.analyse.logical_time import to_logical_time
from playground.explain.replay.analyse.matching import MatchedMessage, match_messages
from playground.explain.replay.analyse.timeline import ref_of
from playground.explain.replay.record.recording import COMPUTE, PHASE, Recording
from playground.explain.replay.render.bands import (
    Band,
    Panel,
    arrow,
    bands_scene,
    box,
    meant_arrows,
    panels_scene,
)
from playground.explain.replay.render.scene import (
    ALPHA,
    ARROW,
    BOX,
    CELL,
    FOREVER,
    WIDTH,
    Mark,
    Scene,
    Size,
)
from playground.explain.replay.render.timeline import format_values, lay_out, message_title
from playground.figures.figure import Evidence, FigureRun, figure, work_of
from playground.ui.units import format_bytes

if TYPE_CHECKING:
    from playground.figures.ranks import Held, Met, SgdStep

SIX_COLLECTIVES = FigureRun("collectives", work_of("six_collectives"), 4, recorded=True)
SEND = FigureRun("send", work_of("send_a_number"), 3, recorded=True)
REDUCE_BROADCAST, EVERYONE_ADDS, RING = (
    FigureRun(name, work_of("all_reduce"), 4, (name,), recorded=True)
    for name in ("reduce-broadcast", "everyone-adds", "ring")
)
OUR_RING = FigureRun("our ring", work_of("our_ring"), 4, recorded=True)
SGD = FigureRun("sgd", work_of("sgd_step"), 4)
HELLO = FigureRun("hello", work_of("meet"), 3)
REDUCE_SCATTER = FigureRun("reduce-scatter", work_of("reduce_scatter"), 4)
DASHED = "Dashed: what is meant to move; inside a collective of the backend it cannot be seen."


def numbers(values: Vector | None) -> str:
    """A rank's numbers; equal ones are written once."""
    if not values:
        return "-"
    return f"{values[0]:g}" if len({*values}) == 1 else " ".join(f"{value:g}" for value in values)


def boxes(held: Iterable[Vector], style: str = "plain", **styles: Iterable[int]) -> list[Mark]:
    """A box for each rank, with its numbers; `styles` are those of single ranks."""
    own = {rank: name for name, ranks in styles.items() for rank in ranks}
    return [
        box(f"rank {rank}\n{numbers(each)}", own.get(rank, style)) for rank, each in enumerate(held)
    ]


def before_band(rows: Sequence[Held], idle: Iterable[int] = ()) -> Band:
    """What every rank holds before; `idle` ranks take no part."""
    return Band(boxes((row.before for row in rows), idle=idle), label="before")


def after_band(rows: Sequence[Held], arrows: Sequence[Mark], idle: Iterable[int] = ()) -> Band:
    """What every rank holds after these messages."""
    return Band(boxes((row.after for row in rows), "value", idle=idle), arrows, "after")


def arrows_of(messages: Iterable[MatchedMessage], text: str = "") -> list[Mark]:
    """The arrows of recorded messages."""
    return [
        arrow(send.rank, receive.rank, text, title=message_title(message), event=ref_of(send))
        for message in messages
        for send, receive in [message]
    ]


@figure("F6", "lessons/all_reduce/figures/allreduce", SIX_COLLECTIVES, is_played=False)
def all_reduce_sum(run: Evidence) -> Scene:
    own: Sequence[Held] = [each["all_reduce"] for each in run.results]
    ranks = range(len(own))
    terms = " + ".join(f"t{rank}" for rank in ranks)
    own_boxes = [
        box(f"rank {rank}\nt{rank} = {numbers(row.before)}") for rank, row in enumerate(own)
    ]
    sums = [box(f"rank {rank}\nT = {numbers(row.after)}", "value") for rank, row in enumerate(own)]
    total = box(f"T = {terms} = {numbers(own[0].after)}", meant=True)
    bands = [
        Band(own_boxes, label="before"),
        Band([total], meant_arrows(ranks, [0])),
        Band(sums, meant_arrows([0], ranks), "after"),
    ]
    about = f"dist.all_reduce on {len(own)} ranks: values before and after are those of the run."
    return bands_scene("All-reduce: the same sum on every rank", bands, about, DASHED)


@figure("F21", "lessons/collectives/figures/communication", SIX_COLLECTIVES)
def six_collectives(run: Evidence) -> Scene:
    ranks: Sequence[dict[str, Held]] = run.results
    return panels_scene(
        "Six collectives: what each rank holds before and after",
        [collective_panel(name, [each[name] for each in ranks]) for name in ranks[0]],
        f"dist.* on {len(ranks)} ranks: values before and after are those of the run.",
        DASHED,
    )


def collective_panel(name: str, rows: Sequence[Held]) -> Panel:
    """One of them: the ranks that give above, the ranks that receive below."""
    ranks = range(len(rows))
    sources = [0] if name in ("scatter", "broadcast") else ranks
    targets = [0] if name in ("gather", "reduce") else ranks
    below = [row.after if rank in targets else () for rank, row in enumerate(rows)]
    received = boxes(below, "value", idle={*ranks} - {*targets})
    given = boxes(row.before for row in rows)
    return name, [Band(given), Band(received, meant_arrows(sources, targets))]


@figure("F7", "lessons/all_reduce/figures/allreduce_1", REDUCE_BROADCAST)
def reduce_broadcast(run: Evidence) -> Scene:
    messages = run.messages
    root = messages[0].receive.rank
    to_root = [message for message in messages if message.receive.rank == root]
    from_root = [message for message in messages if message.send.rank == root]
    total = from_root[0].send.values or ()
    reduced = [total if rank == root else row.before for rank, row in enumerate(run.results)]
    bands = [
        before_band(run.results),
        Band(boxes(reduced, value=[root]), arrows_of(to_root), "reduced"),
        after_band(run.results, arrows_of(from_root)),
    ]
    sent, received = (
        format_bytes(sum(each.send.nbytes for each in every)) for every in (from_root, to_root)
    )
    return bands_scene(
        "All-reduce as reduce, then broadcast",
        bands,
        f"{len(messages)} messages, recorded. Rank {root} receives {received} and sends {sent}: "
        "all of it.",
        f"Every other rank sends {format_bytes(to_root[0].send.nbytes)}: the root's link is the "
        "limit.",
    )


@figure("F8", "lessons/all_reduce/figures/allreduce_2", EVERYONE_ADDS)
def all_to_all(run: Evidence) -> Scene:
    messages, size = run.messages, len(run.results)
    sizes = [message.send.nbytes for message in messages]
    product = f"{size} x {size - 1} = {size * (size - 1)}"
    return bands_scene(
        "All-reduce as all to all",
        [before_band(run.results), after_band(run.results, arrows_of(messages))],
        f"{len(messages)} messages, recorded: N(N - 1) = {product}.",
        f"{format_bytes(sum(sizes))} in all, of tensors of {format_bytes(sizes[0])}.",
    )


RING_MIDDLE = 160.0
"""Pixels from the top."""
RING_RADII = Size(200.0, 120.0)
"""Half the width and height of the rectangle whose corners are four ranks."""
RING_BOX = Size(112.0, 64.0)


@figure("F9", "lessons/all_reduce/figures/ring", RING)
def ring_chunk(run: Evidence) -> Scene:
    size = len(run.results)
    sent = [[each for each in run.messages if each.send.rank == rank] for rank in range(size)]
    # what arrives in a step is sent on in the next one
    hops = [sent[step % size][step] for step in range(len(sent[0]))]
    scene = Scene(f"Ring all-reduce: the way of one chunk, in {len(hops)} hops")
    for number, hop in enumerate(hops, 1):
        add_hop(scene, number, hop, size)
    for rank, row in enumerate(run.results):
        corner = place(rank, size) - complex(*RING_BOX) / 2
        text = f"rank {rank}\n{numbers(row.before)} > {numbers(row.after)}"
        scene.add(BOX, corner.real, corner.imag, *RING_BOX, style="value", text=text)
    x, y = WIDTH / 2, RING_MIDDLE
    scene.write("collected, outside", x, y - CELL.height / 2, "middle", style="chunk")
    scene.write("passed on, inside", x, y + CELL.height / 2, "middle", style="message")
    return scene.with_caption(
        f"Recorded messages: {len(hops)} = 2(N - 1) hops of {format_bytes(hops[0].send.nbytes)}; "
        "the number after each hop is what travels.",
        f"The other {size - 1} chunks do the same at the same time, one rank further on each.",
    )


def place(rank: int, size: int) -> complex:
    """The middle of a rank's box, x + yi. Ranks go round clockwise; rank 0 of four is in the upper
    left corner."""
    angle, corner = 2 * pi * (rank - 0.5) / size, sin(pi / 4)
    x, y = RING_RADII.width * sin(angle) / corner, RING_RADII.height * cos(angle) / corner
    return complex(WIDTH / 2 + x, RING_MIDDLE - y)


def add_hop(scene: Scene, number: int, hop: MatchedMessage, size: int) -> None:
    """Add the arrow of a hop, outside the ring or inside, with its number and the values it
    carries."""
    is_collected = number < size
    begin, end = place(hop.send.rank, size), place(hop.receive.rank, size)
    unit = (end - begin) / abs(end - begin)
    cut = (RING_BOX.width * abs(unit.real) + RING_BOX.height * abs(unit.imag)) / 2 + 4
    way = end - begin - 2 * cut * unit
    begin += unit * complex(cut, -CELL.height if is_collected else CELL.height)
    style, label_at = ("chunk", 0.35) if is_collected else ("message", 0.65)
    look = {"style": style, "label_at": label_at, "event": ref_of(hop.send)}
    text, title = f"{number}: {numbers(hop.send.values)}", f"hop {number}: {message_title(hop)}"
    scene.add(ARROW, begin.real, begin.imag, way.real, way.imag, text=text, title=title, **look)


@figure("F10", "lessons/prove/figures/ring_end", SGD)
def step_everywhere(run: Evidence) -> Scene:
    steps: Sequence[SgdStep] = run.results
    ranks, first = range(len(steps)), steps[0]
    weights = [
        box(f"w {step.weight:+.5f}\n-> {step.new_weight:+.5f}", "optimizer") for step in steps
    ]
    mean = box(f"g {first.average:+.5f}", "communication", meant=True)
    own = [
        box(f"rank {rank}\ng {step.gradient:+.5f}", "backward") for rank, step in enumerate(steps)
    ]
    bands = [Band(own, label="own"), Band([mean], meant_arrows(ranks, [0]), "mean")]
    return bands_scene(
        f"The end of the ring: w = w - {ALPHA} g, the same everywhere",
        [*bands, Band(weights, meant_arrows([0], ranks), "step")],
        f"One weight of {first.parameters:,}, {ALPHA} = {first.lr:g}, "
        f"{sum(step.samples for step in steps)} samples on {len(steps)} ranks.",
        "After the step the replicas' parameters differ by "
        f"{max(step.difference for step in steps):g} at most.",
        DASHED,
    )


@figure("F20", "lessons/p2p/figures/p2p", SEND)
def point_to_point(run: Evidence) -> Scene:
    messages = run.messages
    [idle] = {*range(len(run.results))} - {event.rank for message in messages for event in message}
    send = messages[0].send
    arrows = arrows_of(messages, format_values(send.values or ()))
    return bands_scene(
        "Point to point: one rank sends, another receives",
        [before_band(run.results, [idle]), after_band(run.results, arrows, [idle])],
        f"{len(messages)} message of {format_bytes(send.nbytes)}, recorded: rank {send.rank} to "
        f"rank {send.peer}. Rank {idle} has no part in it.",
    )


@figure("hello", "lessons/hello/figures/one_world", HELLO)
def one_world(run: Evidence) -> Scene:
    processes: Sequence[Met] = run.results
    everyone = range(len(processes))
    started = [box(f"process {each.pid}\nRANK={each.rank}") for each in processes]
    met = [
        box(f"rank {each.rank}\nhas heard from\n{numbers(each.heard_from)}", "value")
        for each in processes
    ]
    return bands_scene(
        "Who starts whom: torchrun starts processes, and they become one world",
        [
            Band([box("torchrun", meant=True)], label="you start"),
            Band(started, meant_arrows([0], everyone), "it starts"),
            Band([box("the store", meant=True)], meant_arrows(everyone, [0]), "the master"),
            Band(met, meant_arrows([0], everyone), "one world"),
        ],
        f"{len(processes)} processes: who each is, and whom it has heard from, as it says itself.",
        "Dashed, and not recorded: torchrun starts the processes, each writes its address into the "
        "store, and reads the others' addresses.",
    )


@figure("reduce-scatter", "lessons/collectives/figures/reduce_scatter", REDUCE_SCATTER)
def reduce_scatter(run: Evidence) -> Scene:
    ranks = range(len(run.results))
    return bands_scene(
        "reduce_scatter: rank r gets the sum of all elements r",
        [before_band(run.results), after_band(run.results, meant_arrows(ranks, ranks))],
        f"dist.reduce_scatter on {len(ranks)} ranks: values before and after are those of the run.",
        DASHED,
    )


@figure("see", "explain/replay/figures/ring", OUR_RING)
def ring(run: Evidence) -> Scene:
    recording = to_logical_time(run.last_step)
    title = "A ring all-reduce, as it was recorded, in logical steps"
    return lay_out(recording, title, unit="step")


PAUSE = 3.0
"""Seconds before the moving picture begins again."""
CHUNK = Size(40.0, 32.0)
"""Width and height of the box of one number."""
MOVING_WIDTH = 400
"""Pixels: it is read on a telephone, too, where a wider picture would be shrunk."""


@figure("moving", "explain/replay/figures/moving", OUR_RING, is_played=False)
def moving(run: Evidence) -> Scene:
    recording = to_logical_time(run.last_step)  # a step takes a second
    held = [[*holdings_of(rank)] for rank in recording.ranks]
    corners = [
        corner_of(rank, recording.size, len(held[0][0].values)) for rank in range(recording.size)
    ]
    title = f"A ring all-reduce on {recording.size} ranks, message by message"
    scene = Scene(title, width=MOVING_WIDTH)
    for rank, (x, y), holdings in zip(recording.ranks, corners, held, strict=True):
        scene.write(f"rank {rank.rank}", x, y - CELL.height)
        add_numbers(scene, x, y, holdings)
        for event in rank.events:
            if event.kind == COMPUTE and event.offset is not None:
                plus = Mark(
                    kind=BOX, text="+", style="optimizer", title=event.name, event=ref_of(event),
                    start=event.start, end=event.end,
                )  # fmt: skip
                scene.place(plus, x + event.offset * CHUNK.width, y, *CHUNK)
    messages = match_messages(recording).matched
    add_messages(scene, messages, corners)
    add_phases(scene, recording)
    scene.period = recording.end + PAUSE
    return scene.with_caption(
        f"Recorded: {len(messages)} messages.",
        "Reduce-scatter: each rank adds what arrives, until it has one whole sum.",
        "All-gather: the sums go round.",
    )


def add_messages(
    scene: Scene, messages: Iterable[MatchedMessage], corners: Sequence[tuple[float, float]]
) -> None:
    """Add the values that travel, from the corner of the sender's numbers to the receiver's."""
    for message in messages:
        send, receive = message
        x, y = corners[send.rank]
        to_x, to_y = corners[receive.rank]
        values = " ".join(f"{value:g}" for value in send.values or ())
        number = Mark(
            kind=BOX, text=values, style="communication", title=message_title(message),
            event=ref_of(send), start=send.start, end=receive.end, travels=(to_x - x, to_y - y),
        )  # fmt: skip
        scene.place(number, x + (send.offset or 0) * CHUNK.width, y, *CHUNK)


def add_phases(scene: Scene, recording: Recording) -> None:
    """Add, below all else, the name of the phase that is under way."""
    y = scene.bottom + 1.5 * CELL.height
    phases = [
        (event.name, event.start, event.end)
        for event in recording.ranks[0].events
        if event.kind == PHASE
    ]
    for name, start, end in (
        *phases,
        ("done: every rank has the same sums", recording.end, FOREVER),
    ):
        scene.write(name, MOVING_WIDTH / 2, y, "middle", style="message", start=start, end=end)


def corner_of(rank: int, size: int, count: int) -> tuple[float, float]:
    """The upper left corner of a rank's `count` numbers. The first half of the ranks is in the
    upper row, to the right, the others are in the lower one, to the left, so that the ring goes
    clockwise."""
    upper = (size + 1) // 2
    column, row = (rank, 0) if rank < upper else (size - 1 - rank, 1)
    x = MOVING_WIDTH * (column + 0.5) / upper - count * CHUNK.width / 2
    return x, 3 * CELL.height + row * 5 * CHUNK.height


def add_numbers(scene: Scene, x: float, y: float, holdings: Sequence[HeldValues]) -> None:
    """Add a box for each number that a rank holds, from one change of it to the next."""
    began, last = holdings[0].time, holdings[-1].values
    for number, at_end in enumerate(last):
        values = [(held.time, held.values[number]) for held in holdings]
        new = [values[0], *(after for before, after in pairwise(values) if after[1] != before[1])]
        for (start, value), (end, _) in pairwise([*new, (FOREVER, at_end)]):
            style = "value" if value == at_end else "plain" if start == began else "compute"
            mark = Mark(kind=BOX, text=f"{value:g}", style=style, start=start, end=end)
            scene.place(mark, x + number * CHUNK.width, y, *CHUNK)
