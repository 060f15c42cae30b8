"""The schedules as text: who worked when, what each held, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence

from playground.console.tables import GAP, RANK_COLUMN, Column, Table
from playground.console.text import Prose, heading, prose
from playground.lessons.pipeline.results import ScheduleRun, span
from playground.lessons.pipeline.settings import BLOCKS, WIDTH, PipelineSettings
from playground.lessons.pipeline.timeline import draw
from playground.measurement.units import format_seconds


def model_text(settings: PipelineSettings) -> str:
    """What is trained, and how it is cut."""
    each = BLOCKS // settings.stages
    replicas = f" on each of {settings.data_parallel} replicas" if settings.data_parallel > 1 else ""
    return (
        f"model: {BLOCKS} equal blocks (linear {WIDTH} x {WIDTH}, ReLU), {each} in each of {settings.stages} "
        f"stage{'s' * (settings.stages > 1)}; batches of {settings.batch_size} samples, in {settings.microbatches} "
        f"microbatches of {settings.microbatch_size}{replicas}"
    )


def crowded_text(ranks: int, cores: int) -> str:
    """Why bubbles do not show where ranks share cores."""
    return (
        f"{ranks} ranks share {cores} core{'s' * (cores > 1)}: while one stage waits, another uses its core, so the "
        f"bubble that is measured says little; gradients, activations and losses hold all the same"
    )


def timeline_texts(run: ScheduleRun, summary: str, width: int) -> list[str | Prose | Table]:
    """One step, a row for each rank. `width`: characters that the text may take."""
    several = len(run.ranks) > run.stages
    columns = [RANK_COLUMN, Column("stage", right=True)][: 1 + several]
    taken = sum(GAP + len(column.heading) for column in columns) + GAP
    about = f"one step of {format_seconds(span(run.typical))}: F forward, B backward, . idle"
    table = Table(*columns, Column(about))
    for rank, line in enumerate(draw(run.typical, max(len(about), width - taken))):
        table.add(*[str(rank), str(rank % run.stages)][: 1 + several], line)
    return [prose(heading(run.name), f": {summary}"), table]


def held_texts(runs: Sequence[ScheduleRun]) -> list[str | Prose | Table]:
    """What every stage held of each schedule, against the rule."""
    rules = (Column(f"{run.name}\n{run.spec.held_rule}", right=True) for run in runs)
    table = Table(Column("stage", right=True), *rules)
    for stage in range(runs[0].stages):
        cells = (f"{run.held(stage)} = {run.held_bytes(stage) / 2**20:.3g} MiB" for run in runs)
        table.add(str(stage), *cells)
    return [prose(heading("activations"), ": microbatches held at once, at most, and what they take"), table]


def cost_texts(runs: Sequence[ScheduleRun]) -> list[str | Prose | Table]:
    """All schedules side by side."""
    table = Table(
        Column("schedule"), Column("bubble", "%", right=True), Column("formula", "%", right=True),
        Column("step", "ms", right=True), Column("first\nloss", right=True), Column("last\nloss", right=True),
        Column("difference from\none process", right=True),
    )  # fmt: skip
    for run in runs:
        table.add(
            run.name, f"{100 * run.bubble:.1f}", f"{100 * run.expected_bubble:.1f}", f"{span(run.typical) * 1000:.1f}",
            f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.gradient_difference:.1e}",
        )  # fmt: skip
    rules = ", ".join(f"{run.name} {run.spec.bubble_rule}" for run in runs)
    about = (
        f"bubble is the share of the time in which ranks idle, in the step that is the median; the formulas are "
        f"{rules}. Difference is the largest of any gradient, in float64"
    )
    return [prose(heading("cost"), f": {about}"), table]


def same_losses_text(runs: Sequence[ScheduleRun]) -> str:
    """What the losses say of the schedules."""
    steps = len(runs[0].losses)
    if all(run.losses == runs[0].losses for run in runs):
        return f"the losses of all {steps} steps have the same bits in every schedule"
    return f"the losses of {steps} steps differ by rounding"
