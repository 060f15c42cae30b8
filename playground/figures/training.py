"""Figures of a training step: its parts, where gradients are averaged in it, and what of that is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from playground.figures.bars import Bar, Piece, add_bars, add_key
from playground.figures.collectives import DASHED
from playground.figures.results import Evidence, SgdStep
from playground.figures.rows import Cell, Move, Panel, Row, add_panels
from playground.figures.scene import ALPHA, BOX, CELL, Drawing, Scene
from playground.figures.timeline import lay_out
from playground.lessons.ladder.page import LadderResult, RungResult
from playground.recording.recording import BUCKET, COLLECTIVE, COMPUTE, RankRecording, Recording

PARTS = {"forward": "forward", "backward": "backward", "exposed": "communication", "step": "optimizer"}
"""Parts of a step as the ladder measures them, and their colours."""
KEY = {style: style for style in PARTS.values()}
FORMULAS = {"backward": "∂J/∂θ", "optimizer": f"θ = θ - {ALPHA} ∂J/∂θ"}
"""What the two compute, J being the loss."""
FLAT, BUCKETED, OVERLAPPED, DDP = "flat", "bucketed", "overlapped", "ddp"
"""Rungs of the ladder."""
BARRIER = "barrier"


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


def last_step(recording: Recording) -> Recording:
    """What came after the last barrier, from time 0 on."""
    ranks = [after_last_barrier(rank) for rank in recording.ranks]
    start = min((event.start for rank in ranks for event in rank.events), default=0.0)
    return replace(recording, ranks=tuple(shift(rank, -start) for rank in ranks))


def after_last_barrier(rank: RankRecording) -> RankRecording:
    ends = [event.end for event in rank.events if event.name == BARRIER]
    begin = ends[-1] if ends else 0.0
    return replace(rank, events=tuple(event for event in rank.events if event.start >= begin))


def shift(rank: RankRecording, seconds: float) -> RankRecording:
    """The same, so much later."""
    events = (replace(event, start=event.start + seconds, end=event.end + seconds) for event in rank.events)
    return replace(rank, events=tuple(events))


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
