"""Figures of training: a step, where gradients are averaged in it and what of that is hidden; buckets as they leave;
and steps on the stages of a pipeline, and on ranks that are killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from playground.lessons.ladder.page import LadderResult, RungResult
from playground.lessons.pipeline.page import PipelineSettings, ScheduleRun, Slot, collect, span
from playground.measurement.units import format_bytes
from playground.see.paint.collectives import DASHED
from playground.see.paint.results import Backward, BucketSent, Evidence, SgdStep, last_step
from playground.see.paint.rows import Bar, Cell, Move, Panel, Piece, Row, add_bars, add_key, add_panels
from playground.see.paint.scene import (
    ALPHA,
    BAR,
    BOX,
    CELL,
    LANE,
    TEXT,
    Drawing,
    Scene,
    TimeAxis,
    bucket_style,
    shorten,
)
from playground.see.paint.timeline import LABELS, ROW, lay_out
from playground.see.record.recording import BUCKET, COLLECTIVE, COMPUTE, Recording
from playground.training.settings import TrainingSettings

PARTS = {"forward": "forward", "backward": "backward", "exposed": "communication", "step": "optimizer"}
"""Parts of a step as the ladder measures them, and their colours."""
KEY = {style: style for style in PARTS.values()}
FORMULAS = {"backward": "∂J/∂θ", "optimizer": f"θ = θ - {ALPHA} ∂J/∂θ"}
"""What the two compute, J being the loss."""
FLAT, BUCKETED, OVERLAPPED, DDP = "flat", "bucketed", "overlapped", "ddp"
"""Rungs of the ladder."""


def backward_and_step(run: Evidence) -> Scene:
    """F3: what backward computes the optimizer applies, and backward is what costs."""
    results: Sequence[LadderResult] = run.results
    rung = rung_of(results[0], FLAT)
    drawing = Drawing("Backward computes the gradient, step applies it")
    for number, (name, formula) in enumerate(FORMULAS.items()):
        drawing.add(
            BOX, CELL[0] + 320 * number, 0, 296, 64, style=name, text=f"{name}\n{formula}", title=f"{name}: {formula}"
        )
    bars = [
        Bar(label=part, pieces=[Piece(value=seconds, style=PARTS[part])], note=f"{seconds * 1e3:.3g} ms")
        for part, seconds in (("forward", rung.forward), ("backward", rung.backward), ("step", rung.step))
    ]
    add_bars(drawing, bars)
    times = f"backward takes {rung.backward / rung.step:.3g} times as long as step"
    return drawing.scene(f"{times}. The ladder's rung {rung.rung}: medians of its steps on {len(results)} ranks.")


def rung_of(result: LadderResult, name: str) -> RungResult:
    return next(rung for rung in result.rungs if rung.rung == name)


def five_phases(run: Evidence) -> Scene:
    """F11: one store of samples feeds all processes; each has the model; gradients are averaged; all step."""
    steps: Sequence[SgdStep] = run.results
    ranks = range(len(steps))
    fan_out = [Move(source=0, target=rank, meant=True) for rank in ranks]
    rows = [
        Row(label="", cells=[Cell(text=f"a store of {sum(step.samples for step in steps)} samples")]),
        Row(
            label="1 samples",
            cells=[Cell(text=f"rank {rank}\n{steps[rank].samples} samples") for rank in ranks],
            moves=fan_out,
        ),
        Row(label="2 model", cells=[Cell(text=f"w {step.weight:+.5f}", style="forward") for step in steps]),
        Row(label="3 gradient", cells=[Cell(text=f"g {step.gradient:+.5f}", style="backward") for step in steps]),
        Row(
            label="4 average",
            cells=[Cell(text=f"all-reduce: g {steps[0].average:+.5f}", style="communication", meant=True)],
            moves=[Move(source=rank, target=0, meant=True) for rank in ranks],
        ),
        Row(
            label="5 step",
            cells=[Cell(text=f"w {step.new_weight:+.5f}", style="optimizer") for step in steps],
            moves=fan_out,
        ),
    ]
    drawing = Drawing("Synchronous SGD in five phases")
    add_panels(drawing, [Panel(title="", rows=rows)], columns=1)
    difference = max(step.replicas_max_difference for step in steps)
    return drawing.scene(
        f"One weight w and its gradient g on {len(steps)} ranks. After the step the replicas differ by {difference:g}.",
        DASHED,
    )


def after_backward(run: Evidence) -> Scene:
    """F12: gradients are averaged when backward is over."""
    return averaging(run.recorded, "All-reduce after backward")


def inside_backward(run: Evidence) -> Scene:
    """F13: gradients are averaged while backward goes on."""
    return averaging(run.recorded, "All-reduce inside backward")


def averaging(recording: Recording, title: str) -> Scene:
    """The last step, and in words when averaging began and ended in it."""
    step = last_step(recording)
    scene = lay_out(step, title)
    lines = []
    for rank in step.ranks:
        backward = [event for event in rank.events if event.kind == COMPUTE and event.name == "backward"]
        calls = [event for event in rank.events if event.kind in (COLLECTIVE, BUCKET)]
        if backward and calls:
            begin, end = backward[0].start, max(event.end for event in backward)
            first, last = calls[0].start, max(event.end for event in calls)
            lines.append(
                f"Rank {rank.rank}: backward {begin * 1e3:.2f} to {end * 1e3:.2f} ms; "
                f"averaging {first * 1e3:.2f} to {last * 1e3:.2f} ms."
            )
    return replace(scene, caption=(*lines, "What the backend sends inside an all-reduce cannot be seen."))


def normalised_parts(run: Evidence) -> Scene:
    """F14: what a step's time goes into, on every rung."""
    results: Sequence[LadderResult] = run.results
    drawing = Drawing("What a training step's time goes into")
    bars = []
    for rung in results[0].rungs:
        parts = {part: getattr(rung, part) for part in PARTS}
        whole = sum(parts.values())
        pieces = [
            Piece(value=seconds / whole, style=PARTS[part], text=f"{seconds / whole:.2f}", title=f"{rung.rung}: {part}")
            for part, seconds in parts.items()
        ]
        bars.append(Bar(label=rung.rung, pieces=pieces, note=f"{whole * 1e3:.3g} ms"))
    add_bars(drawing, bars, most=1.0)
    add_key(drawing, KEY)
    return drawing.scene(
        f"Shares of each step; communication is what is exposed: not hidden behind backward. {len(results)} ranks."
    )


def with_and_without_overlap(run: Evidence) -> Scene:
    """F15: the same step without and with overlap, and the share of averaging that is hidden."""
    results: Sequence[LadderResult] = run.results
    drawing = Drawing("A step without and with overlap")
    for without, with_overlap in ((BUCKETED, OVERLAPPED), (FLAT, DDP)):
        first, second = (rung_of(results[0], name) for name in (without, with_overlap))
        whole = sum(getattr(first, part) for part in PARTS)
        bars = []
        for rung in (first, second):
            pieces = [
                Piece(value=getattr(rung, part) / whole, style=style, title=f"{rung.rung}: {part}")
                for part, style in PARTS.items()
            ]
            total = sum(piece.value for piece in pieces)
            bars.append(
                Bar(label=f"{rung.rung:10}", pieces=pieces, note=f"{total:.2f} ({rung.hidden * 100:3.0f} % hidden)")
            )
        add_bars(drawing, bars, most=1.3)
    add_key(drawing, KEY)
    return drawing.scene(
        "Of each pair the first is 1.00. Hidden: the share of the averaging's time alone that is not exposed.",
        f"Medians of the ladder's steps on {len(results)} ranks.",
    )


NAMES = 14 * CELL[0]
"""Where names stand, in pixels from the left."""
BUCKET_ROW = 2 * CELL[1]


def filling(run: Evidence) -> Scene:
    """F16: gradients get ready, the last layers' first; a bucket leaves when its last gradient is ready."""
    backwards: Sequence[Backward] = run.results
    backward = backwards[0]
    drawing = Drawing("Buckets fill in backward, the last layers' first")
    axis = TimeAxis(x=NAMES, w=drawing.width - NAMES - CELL[0], start=0.0, end=backward.seconds)
    bucket_of = {number: bucket.number for bucket in backward.sent for number in bucket.parameters}
    for place, (number, seconds) in enumerate(backward.ready):
        y = float(place * CELL[1])
        add_line(drawing, backward.names[number], y, CELL[1])
        drawing.add(
            BAR, NAMES, y, max(axis.at(seconds) - NAMES, 1), CELL[1], style=bucket_style(bucket_of[number]),
            title=f"{backward.names[number]} ready after {seconds * 1e3:.2f} ms", start=0.0, end=seconds,
        )  # fmt: skip
    for bucket in backward.sent:
        add_bucket(drawing, bucket, axis)
    drawing.add(TEXT, NAMES, drawing.bottom + CELL[1], text="0 ms", align="start", style="muted")
    drawing.add(
        TEXT,
        axis.x + axis.w,
        drawing.bottom,
        text=f"backward over: {backward.seconds * 1e3:.2f} ms",
        align="end",
        style="muted",
    )
    return drawing.scene(
        f"Rank 0 of {len(backwards)}. Above: how long backward takes to each gradient, in the colour of its bucket. "
        "Below: each bucket from when it leaves until its sum is there.",
        *(f"{bucket_text(bucket)}." for bucket in backward.sent),
        axis=axis,
    )


def add_line(drawing: Drawing, name: str, y: float, height: float) -> None:
    """A name, and the lane beside it."""
    drawing.add(TEXT, CELL[0], y + height / 2, text=shorten(name, NAMES - CELL[0]), align="start")
    drawing.add(LANE, NAMES, y, drawing.width - NAMES - CELL[0], height, style="idle")


def add_bucket(drawing: Drawing, bucket: BucketSent, axis: TimeAxis) -> None:
    y = drawing.bottom + CELL[1]
    add_line(drawing, f"bucket {bucket.number}", y, BUCKET_ROW)
    left, right = axis.at(bucket.left), axis.at(bucket.done)
    drawing.add(
        BAR, left, y, max(right - left, 2), BUCKET_ROW, style=bucket_style(bucket.number), title=bucket_text(bucket),
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
                BOX,
                x + 2 * CELL[0],
                y + (2 + 2.5 * place) * CELL[1],
                width - 4 * CELL[0],
                2 * CELL[1],
                text=shorten(f"param {number}: {backward.names[number]}", width - 4 * CELL[0]),
            )
        y += height + CELL[1]


def bert_step(run: Evidence) -> Scene:
    """bert: DistributedDataParallel sends a layer's gradients while backward computes those of the one below it."""
    return averaging(run.recorded, "A step of BERT by DistributedDataParallel")


def attempts(run: Evidence) -> Scene:
    """elastic: after each failure all ranks start anew, and go on from the newest snapshot."""
    steps, starts, ends = steps_of_attempts(run)
    drawing = Drawing("A rank is killed, all start anew and go on from a snapshot")
    bars = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        kept = min(end, starts[number + 1]) if number + 1 < len(starts) else end
        pieces = [
            Piece(value=start, style="plain", title=f"{start} steps from a snapshot"),
            Piece(value=kept - start, style="forward", title=f"steps {start + 1} to {kept}"),
            Piece(value=end - kept, style="wait", title=f"{end - kept} steps that are redone"),
        ]
        note = f"killed after {end}" if end < steps else f"step {end}: the end"
        bars.append(Bar(label=f"attempt {number + 1}", pieces=pieces, note=note))
    add_bars(drawing, bars, most=steps)
    add_key(drawing, {"plain": "from a snapshot", "forward": "steps taken", "wait": "lost, and redone"})
    return drawing.scene(
        f"Training of {steps} steps on {len(run.results)} ranks, of which one is killed after step "
        f"{' and one after step '.join(map(str, ends[:-1]))}."
    )


def steps_of_attempts(run: Evidence) -> tuple[int, list[int], list[int]]:
    """How many steps the training has; of each attempt how many were done when it began, and when it ended."""
    settings: TrainingSettings = run.arguments[0]
    steps = settings.epochs * ceil((settings.limit or 0) / settings.batch_size)
    ends = [event["killed"] for _, event in run.reports if "killed" in event]
    resumed = [event["resumed"]["total"] for rank, event in run.reports if rank == 0 and "resumed" in event]
    starts = [0] * (1 + len(ends) - len(resumed)) + resumed
    return steps, starts, [*ends, steps]


def schedules(run: Evidence) -> Scene:
    """pipeline: when each stage was at which microbatch, by each schedule."""
    settings: PipelineSettings = run.arguments[0]
    stages, microbatches = settings.stages, settings.microbatches
    runs = collect(run.results, settings.schedules, stages, microbatches)
    drawing = Drawing("A pipeline's stages at work, by three schedules")
    longest = max(span(each.typical) for each in runs)
    axis = TimeAxis(x=LABELS, w=drawing.width - LABELS - CELL[0], start=0.0, end=longest)
    for each in runs:
        add_schedule(drawing, each, axis)
    add_key(drawing, {"forward": "forward", "backward": "backward of a microbatch"})
    return drawing.scene(
        f"A batch of {microbatches} microbatches on {stages} stages; each lane is a stage, its gaps are the bubble: "
        + ", ".join(f"{each.bubble:.0%} with {each.name}" for each in runs)
        + ".",
        axis=axis,
    )


def add_schedule(drawing: Drawing, run: ScheduleRun, axis: TimeAxis) -> None:
    """The step whose bubble is the median: a lane for each stage."""
    step = run.typical
    begin = min(slot.start for rank in step for slot in rank)
    y = drawing.bottom + (CELL[1] if drawing.marks else 0)
    drawing.add(TEXT, CELL[0], y + CELL[1] / 2, text=f"{run.name}: {span(step) * 1e3:,.0f} ms", align="start")
    for stage, slots in enumerate(step):
        y += 1.5 * ROW
        drawing.add(TEXT, CELL[0], y + ROW / 2, text=f"stage {stage}", align="start", style="muted")
        drawing.add(LANE, axis.x, y, axis.w, ROW, style="idle")
        for slot in slots:
            add_slot(drawing, slot, begin, y, axis)


def add_slot(drawing: Drawing, slot: Slot, begin: float, y: float, axis: TimeAxis) -> None:
    """A forward or a backward, with the number of its microbatch."""
    start, end = slot.start - begin, slot.end - begin
    left, right = axis.at(start), axis.at(end)
    style = "forward" if slot.kind == "F" else "backward"
    drawing.add(
        BAR, left, y, right - left, ROW, style=style, text=str(slot.microbatch) if right - left > CELL[0] else "",
        title=f"{style} of microbatch {slot.microbatch}, {slot.seconds * 1e3:.3g} ms", start=start, end=end,
    )  # fmt: skip
