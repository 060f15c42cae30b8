"""Figures of DistributedDataParallel's buckets: what is in them, how they fill, when they leave."""

from __future__ import annotations

from collections.abc import Sequence

from playground.measurement.units import format_bytes
from playground.see.paint.palette import bucket_style
from playground.see.paint.results import Backward, BucketSent, Evidence
from playground.see.paint.scene import BAR, BOX, CELL, LANE, TEXT, Drawing, Scene, TimeAxis, shorten

LABELS = 14 * CELL[0]
"""Where names stand, in pixels from the left."""
ROW = 2 * CELL[1]


def filling(run: Evidence) -> Scene:
    """F16: gradients get ready, the last layers' first; a bucket leaves when its last gradient is ready."""
    backwards: Sequence[Backward] = run.results
    backward = backwards[0]
    drawing = Drawing("Buckets fill in backward, the last layers' first")
    axis = TimeAxis(x=LABELS, w=drawing.width - LABELS - CELL[0], start=0.0, end=backward.seconds)
    bucket_of = {number: bucket.number for bucket in backward.sent for number in bucket.parameters}
    for place, (number, seconds) in enumerate(backward.ready):
        y = float(place * CELL[1])
        add_line(drawing, backward.names[number], y, CELL[1])
        drawing.add(
            BAR, LABELS, y, max(axis.at(seconds) - LABELS, 1), CELL[1], style=bucket_style(bucket_of[number]),
            title=f"{backward.names[number]} ready after {seconds * 1e3:.2f} ms", start=0.0, end=seconds,
        )  # fmt: skip
    for bucket in backward.sent:
        add_bucket(drawing, bucket, axis)
    drawing.add(TEXT, LABELS, drawing.bottom + CELL[1], text="0 ms", align="start", style="muted")
    drawing.add(
        TEXT, axis.x + axis.w, drawing.bottom, text=f"backward over: {backward.seconds * 1e3:.2f} ms", align="end",
        style="muted",
    )  # fmt: skip
    return drawing.scene(
        f"Rank 0 of {len(backwards)}. Above: how long backward takes to each gradient, in the colour of its bucket. "
        "Below: each bucket from when it leaves until its sum is there.",
        *(f"{bucket_text(bucket)}." for bucket in backward.sent),
        axis=axis,
    )


def add_line(drawing: Drawing, name: str, y: float, height: float) -> None:
    """A name, and the lane beside it."""
    drawing.add(TEXT, CELL[0], y + height / 2, text=shorten(name, LABELS - CELL[0]), align="start")
    drawing.add(LANE, LABELS, y, drawing.width - LABELS - CELL[0], height, style="idle")


def add_bucket(drawing: Drawing, bucket: BucketSent, axis: TimeAxis) -> None:
    y = drawing.bottom + CELL[1]
    add_line(drawing, f"bucket {bucket.number}", y, ROW)
    left, right = axis.at(bucket.left), axis.at(bucket.done)
    drawing.add(
        BAR, left, y, max(right - left, 2), ROW, style=bucket_style(bucket.number), title=bucket_text(bucket),
        start=bucket.left, end=bucket.done,
    )  # fmt: skip


def bucket_text(bucket: BucketSent) -> str:
    """A bucket in words."""
    return (
        f"bucket {bucket.number} ({format_bytes(bucket.bytes)}) left after {bucket.left * 1e3:.2f} ms, "
        f"its sum was there after {bucket.done * 1e3:.2f} ms"
    )


def same_on_both(run: Evidence) -> Scene:
    """F19: processes with the same parameters put them into the same buckets."""
    backwards: Sequence[Backward] = run.results
    drawing = Drawing("The same buckets on every rank")
    width = (drawing.width - CELL[0]) / len(backwards)
    for rank, backward in enumerate(backwards):
        add_process(drawing, rank, backward, CELL[0] + rank * width, width - 2 * CELL[0])
    same = len({tuple((each.number, each.parameters) for each in backward.sent) for backward in backwards}) == 1
    left = ", then ".join(f"bucket {bucket.number}" for bucket in backwards[0].sent)
    return drawing.scene(
        f"Gradients of {len(backwards[0].names)} parameters on {len(backwards)} ranks; in this run the buckets are "
        f"{'the same' if same else 'NOT the same'} on all.",
        f"{left} left: a bucket leaves when all its gradients are ready, and the last parameters' are ready first.",
    )


def add_process(drawing: Drawing, rank: int, backward: Backward, x: float, width: float) -> None:
    """A rank's parameters, each in its bucket, in the order in which the buckets left."""
    drawing.add(TEXT, x, CELL[1] / 2, text=f"rank {rank}", align="start")
    y = 2.0 * CELL[1]
    for bucket in backward.sent:
        height = (3 + 2.5 * len(bucket.parameters)) * CELL[1]
        style = bucket_style(bucket.number)
        label = f"bucket {bucket.number}, {format_bytes(bucket.bytes)}"
        drawing.add(BOX, x, y, width, height, style=style, title=f"rank {rank}: {label}")
        drawing.add(TEXT, x + CELL[0], y + CELL[1], text=label, align="start")
        for place, number in enumerate(bucket.parameters):
            drawing.add(
                BOX, x + 2 * CELL[0], y + (2 + 2.5 * place) * CELL[1], width - 4 * CELL[0], 2 * CELL[1],
                text=shorten(f"param {number}: {backward.names[number]}", width - 4 * CELL[0]),
            )  # fmt: skip
        y += height + CELL[1]
