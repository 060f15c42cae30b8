"""Pictures of chapters that no figure of the tutorials is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from playground.figures.bars import Bar, Piece, add_bars, add_key
from playground.figures.collectives import numbers
from playground.figures.logical import to_logical_time
from playground.figures.results import Evidence
from playground.figures.rows import Cell, Move, Panel, Row, add_panels
from playground.figures.scene import BAR, CELL, LANE, TEXT, Drawing, Scene, TimeAxis
from playground.figures.timeline import LABELS, ROW, lay_out
from playground.figures.training import averaging, last_step
from playground.lessons.pipeline.page import PipelineSettings, ScheduleRun, Slot, collect, span
from playground.training.settings import TrainingSettings


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


def bert_step(run: Evidence) -> Scene:
    """bert: DistributedDataParallel sends a layer's gradients while backward computes those of the one below it."""
    return averaging(run.recorded, "A step of BERT by DistributedDataParallel")


def ring(run: Evidence) -> Scene:
    """see: what is painted of any run, here in logical steps."""
    recording = to_logical_time(last_step(run.recorded))
    return lay_out(recording, "A ring all-reduce, as it was recorded, in logical steps", unit="step")


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
