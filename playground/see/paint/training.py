"""Figures of training: the parts of a step, where in it gradients are averaged, and how much of that is hidden; buckets
as they leave; steps on the stages of a pipeline, and on ranks that are killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import playground.see.paint as paint
from playground.lessons.pipeline.page import PipelineSettings, ScheduleRun, collect, span
from playground.measurement import Fields, format_bytes
from playground.see.paint import CELL, Bar, Cell, Drawing, Piece, Row, Scene, add_bars, add_key, meant_moves, rows_scene
from playground.see.paint.collectives import DASHED
from playground.see.paint.results import Backward, Evidence, SgdStep, last_step
from playground.see.paint.timeline import LABELS, ROW, lay_out
from playground.see.record import BUCKET, COLLECTIVE, COMPUTE
from playground.training.settings import TrainingSettings

PARTS = {"forward": "forward", "backward": "backward", "exposed": "communication", "step": "optimizer"}
"""Parts of a step as the ladder measures them, and their styles."""
KEY = {style: style for style in PARTS.values()}
FORMULAS = {"backward": "∂J/∂θ", "optimizer": f"θ = θ - {paint.ALPHA} ∂J/∂θ"}
"""Formulas of backward and the optimizer; J is the loss."""


def rung_of(run: Evidence, name: str) -> Fields:
    """Rank 0's measurements on this rung of the ladder."""
    rungs: list[Fields] = run.results[0]["rungs"]
    return next(rung for rung in rungs if rung["rung"] == name)


def backward_and_step(run: Evidence) -> Scene:
    """F3: backward computes the gradient, step applies it: what each costs."""
    rung = rung_of(run, "flat")
    drawing = Drawing("Backward computes the gradient, step applies it")
    for number, (name, formula) in enumerate(FORMULAS.items()):
        look = {"style": name, "text": f"{name}\n{formula}", "title": f"{name}: {formula}"}
        drawing.add(paint.BOX, CELL[0] + 320 * number, 0, 296, 64, **look)
    times = {part: rung[part] for part in ("forward", "backward", "step")}
    bars = [Bar(part, [Piece(seconds, PARTS[part])], f"{seconds * 1e3:.3g} ms") for part, seconds in times.items()]
    add_bars(drawing, bars)
    return drawing.scene(
        f"backward takes {rung['backward'] / rung['step']:.3g} times as long as step. "
        f"The ladder's rung {rung['rung']}: medians of its steps on {len(run.results)} ranks."
    )


def five_phases(run: Evidence) -> Scene:
    """F11: synchronous SGD in five phases."""
    steps: Sequence[SgdStep] = run.results
    size, ranks = len(steps), range(len(steps))
    fan_out = meant_moves([0], ranks)
    average = Cell(f"all-reduce: g {steps[0].average:+.5f}", "communication", meant=True)
    rows = [
        Row([Cell(f"a store of {sum(step.samples for step in steps)} samples")]),
        Row([Cell(f"rank {rank}\n{steps[rank].samples} samples") for rank in ranks], fan_out, "1 samples"),
        Row([Cell(f"w {step.weight:+.5f}", "forward") for step in steps], label="2 model"),
        Row([Cell(f"g {step.gradient:+.5f}", "backward") for step in steps], label="3 gradient"),
        Row([average], meant_moves(ranks, [0]), "4 average"),
        Row([Cell(f"w {step.new_weight:+.5f}", "optimizer") for step in steps], fan_out, "5 step"),
    ]
    difference = max(step.replicas_max_difference for step in steps)
    about = f"One weight w and its gradient g on {size} ranks. After the step the replicas differ by {difference:g}."
    return rows_scene("Synchronous SGD in five phases", rows, about, DASHED)


def after_backward(run: Evidence) -> Scene:
    """F12: all-reduce after backward."""
    return averaging(run, "All-reduce after backward")


def inside_backward(run: Evidence) -> Scene:
    """F13: all-reduce inside backward."""
    return averaging(run, "All-reduce inside backward")


def bert_step(run: Evidence) -> Scene:
    """bert: a step of BERT: buckets leave while backward goes on."""
    return averaging(run, "A step of BERT by DistributedDataParallel")


def averaging(run: Evidence, title: str) -> Scene:
    """The last step, with a caption on when averaging began and ended in it."""
    step = last_step(run.recorded)
    lines = []
    for rank in step.ranks:
        backward = [event for event in rank.events if event.kind == COMPUTE and event.name == "backward"]
        calls = [event for event in rank.events if event.kind in (COLLECTIVE, BUCKET)]
        if backward and calls:
            spans = ((each[0].start * 1e3, max(event.end for event in each) * 1e3) for each in (backward, calls))
            first, last = (f"{start:.2f} to {end:.2f} ms" for start, end in spans)
            lines.append(f"Rank {rank.rank}: backward {first}; averaging {last}.")
    lines.append("What the backend sends inside an all-reduce cannot be seen.")
    return replace(lay_out(step, title), caption=tuple(lines))


def normalised_parts(run: Evidence) -> Scene:
    """F14: what a training step's time goes into, rung by rung."""
    drawing, bars = Drawing("What a training step's time goes into"), []
    for rung in run.results[0]["rungs"]:
        whole = sum(rung[part] for part in PARTS)
        shares = {part: rung[part] / whole for part in PARTS}
        pieces = [
            Piece(share, PARTS[part], f"{rung['rung']}: {part}", f"{share:.2f}") for part, share in shares.items()
        ]
        bars.append(Bar(rung["rung"], pieces, f"{whole * 1e3:.3g} ms"))
    add_bars(drawing, bars, most=1.0)
    add_key(drawing, KEY)
    about = "Shares of each step; communication is what is exposed: not hidden behind backward."
    return drawing.scene(f"{about} {len(run.results)} ranks.")


def with_and_without_overlap(run: Evidence) -> Scene:
    """F15: a step without and with overlap."""
    drawing = Drawing("A step without and with overlap")
    for pair in (("bucketed", "overlapped"), ("flat", "ddp")):
        rungs = [rung_of(run, name) for name in pair]
        whole = sum(rungs[0][part] for part in PARTS)
        bars = []
        for rung in rungs:
            shares = {part: rung[part] / whole for part in PARTS}
            pieces = [Piece(share, PARTS[part], f"{rung['rung']}: {part}") for part, share in shares.items()]
            note = f"{sum(shares.values()):.2f} ({rung['hidden'] * 100:3.0f} % hidden)"
            bars.append(Bar(f"{rung['rung']:10}", pieces, note))
        add_bars(drawing, bars, most=1.3)
    add_key(drawing, KEY)
    return drawing.scene(
        "Of each pair the first is 1.00. Hidden: the share of the averaging's time alone that is not exposed.",
        f"Medians of the ladder's steps on {len(run.results)} ranks.",
    )


NAMES = 14 * CELL[0]
"""Width of the names, in pixels."""
BUCKET_ROW = 2 * CELL[1]


def bucket_style(number: int) -> str:
    return f"bucket {number % paint.BUCKETS}"


def filling(run: Evidence) -> Scene:
    """F16: DistributedDataParallel's buckets fill and leave."""
    backward: Backward = run.results[0]
    drawing = Drawing("Buckets fill in backward, the last layers' first")
    axis = paint.TimeAxis(x=NAMES, w=drawing.width - NAMES - CELL[0], start=0.0, end=backward.seconds)
    bucket_of = {number: bucket.number for bucket in backward.sent for number in bucket.parameters}
    for place, (number, seconds) in enumerate(backward.ready):
        y, name = float(place * CELL[1]), backward.names[number]
        paint.add_lane(drawing, paint.shorten(name, NAMES - CELL[0]), NAMES, y, CELL[1])
        look = {"style": bucket_style(bucket_of[number]), "title": f"{name} ready after {seconds * 1e3:.2f} ms"}
        drawing.add(paint.BAR, NAMES, y, max(axis.at(seconds) - NAMES, 1), CELL[1], **look)
    lines = []
    for bucket in backward.sent:
        lines.append(
            f"bucket {bucket.number} ({format_bytes(bucket.bytes)}) left after {bucket.left * 1e3:.2f} ms, "
            f"its sum was there after {bucket.done * 1e3:.2f} ms"
        )
        y, left = drawing.bottom + CELL[1], axis.at(bucket.left)
        paint.add_lane(drawing, f"bucket {bucket.number}", NAMES, y, BUCKET_ROW)
        look = {"style": bucket_style(bucket.number), "title": lines[-1]}
        width = max(axis.at(bucket.done) - left, 2)
        drawing.add(paint.BAR, left, y, width, BUCKET_ROW, **look)
    over = f"backward over: {backward.seconds * 1e3:.2f} ms"
    drawing.add(paint.TEXT, NAMES, drawing.bottom + CELL[1], text="0 ms", align="start", style="muted")
    drawing.add(paint.TEXT, axis.x + axis.w, drawing.bottom, text=over, align="end", style="muted")
    return drawing.scene(
        f"Rank 0 of {len(run.results)}. Above: how long backward takes to each gradient, in the colour of its bucket. "
        "Below: each bucket from when it leaves until its sum is there.",
        *(f"{line}." for line in lines),
    )


def same_on_both(run: Evidence) -> Scene:
    """F19: the same buckets on every rank."""
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
    """Add a rank's parameters, each in its bucket, in the order in which the buckets left."""
    drawing.add(paint.TEXT, x, CELL[1] / 2, text=f"rank {rank}", align="start")
    y, inner = 2.0 * CELL[1], width - 4 * CELL[0]
    for bucket in backward.sent:
        height = (3 + 2.5 * len(bucket.parameters)) * CELL[1]
        label = f"bucket {bucket.number}, {format_bytes(bucket.bytes)}"
        drawing.add(paint.BOX, x, y, width, height, style=bucket_style(bucket.number), title=f"rank {rank}: {label}")
        drawing.add(paint.TEXT, x + CELL[0], y + CELL[1], text=label, align="start")
        for place, number in enumerate(bucket.parameters):
            text = paint.shorten(f"param {number}: {backward.names[number]}", inner)
            drawing.add(paint.BOX, x + 2 * CELL[0], y + (2 + 2.5 * place) * CELL[1], inner, 2 * CELL[1], text=text)
        y += height + CELL[1]


def attempts(run: Evidence) -> Scene:
    """elastic: ranks are killed, and the training goes on from a snapshot."""
    steps, starts, ends = steps_of_attempts(run)
    drawing = Drawing("A rank is killed; all restart, and resume from a snapshot")
    bars = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        kept = min([end, *starts[number : number + 1]])
        pieces = [
            Piece(start, "plain", f"{start} steps from a snapshot"),
            Piece(kept - start, "forward", f"steps {start + 1} to {kept}"),
            Piece(end - kept, "wait", f"{end - kept} steps that are redone"),
        ]
        bars.append(Bar(f"attempt {number}", pieces, f"killed after {end}" if end < steps else f"step {end}: the end"))
    add_bars(drawing, bars, most=steps)
    add_key(drawing, {"plain": "from a snapshot", "forward": "steps taken", "wait": "lost, and redone"})
    return drawing.scene(
        f"Training of {steps} steps on {len(run.results)} ranks, of which one is killed after step "
        f"{' and one after step '.join(map(str, ends[:-1]))}."
    )


def steps_of_attempts(run: Evidence) -> tuple[int, list[int], list[int]]:
    """The number of steps of the training, and for each attempt the numbers of steps at its start and at its end."""
    settings: TrainingSettings = run.arguments[0]
    steps = settings.epochs * ceil((settings.limit or 0) / settings.batch_size)
    ends = [event["killed"] for _, event in run.reports if "killed" in event]
    resumed = [event["resumed"]["total"] for rank, event in run.reports if rank == 0 and "resumed" in event]
    starts = [0] * (1 + len(ends) - len(resumed)) + resumed
    return steps, starts, [*ends, steps]


def schedules(run: Evidence) -> Scene:
    """pipeline: a pipeline's stages at work, by three schedules."""
    settings: PipelineSettings = run.arguments[0]
    stages, microbatches = settings.stages, settings.microbatches
    runs = collect(run.results, settings)
    drawing = Drawing("A pipeline's stages at work, by three schedules")
    longest = max(span(each.typical) for each in runs)
    axis = paint.TimeAxis(x=LABELS, w=drawing.width - LABELS - CELL[0], start=0.0, end=longest)
    for each in runs:
        add_schedule(drawing, each, axis)
    add_key(drawing, {"forward": "forward", "backward": "backward of a microbatch"})
    bubbles = ", ".join(f"{each.summary['bubble']:.0%} with {each.spec.name}" for each in runs)
    return drawing.scene(
        f"A batch of {microbatches} microbatches on {stages} stages; each lane is a stage, its gaps are the bubble: "
        f"{bubbles}."
    )


def add_schedule(drawing: Drawing, run: ScheduleRun, axis: paint.TimeAxis) -> None:
    """Add a lane for each stage, with the step whose bubble is the median."""
    step = run.typical
    began = min(slot.start for rank in step for slot in rank)
    y = drawing.bottom + (CELL[1] if drawing.marks else 0)
    drawing.add(
        paint.TEXT, CELL[0], y + CELL[1] / 2, text=f"{run.spec.name}: {span(step) * 1e3:,.0f} ms", align="start"
    )
    for stage, slots in enumerate(step):
        y += 1.5 * ROW
        drawing.add(paint.TEXT, CELL[0], y + ROW / 2, text=f"stage {stage}", align="start", style="muted")
        drawing.add(paint.LANE, axis.x, y, axis.w, ROW, style="idle")
        for slot in slots:
            start, end = slot.start - began, slot.end - began
            left, width = axis.at(start), axis.at(end) - axis.at(start)
            style = "forward" if slot.kind == "F" else "backward"
            text = str(slot.microbatch) if width > CELL[0] else ""
            title = f"{style} of microbatch {slot.microbatch}, {slot.seconds * 1e3:.3g} ms"
            drawing.add(paint.BAR, left, y, width, ROW, style=style, text=text, title=title)
