"""What the ladder measured, as text: what the columns mean, a row per rung; and as a figure: a bar per rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from playground.console import plots
from playground.console.tables import Column, Table
from playground.console.text import Prose
from playground.lessons.ladder.results import PARTS, RungResult
from playground.lessons.ladder.settings import candidates

LEGEND = (
    "  p50: median time of a step, on its slowest rank. Its parts are medians on the rank that is the last to start "
    "averaging: forward; backward, until the last gradient is ready; exposed, from then until all gradients are "
    "averaged (in the row parameters, what averaging them takes after the optimizer's step). alone: what the same "
    "averaging takes without a backward to hide behind; hidden: the share of it that is not exposed. vs. ddp, vs. "
    "first: how many times as fast as ddp, and as the first rung.",
    "  With --wide: p95, which 95 of 100 steps stay below; step, the optimizer's; early, the share of the bytes that "
    "are sent before the last gradient is ready (nothing else can be hidden); messages and bytes that a rank sends "
    "in a step; the loss of the last batch; distance, the largest difference of any parameter from ddp's (rounding, "
    "which grows where it decides which of two numbers a ReLU or max_pool lets through).",
)


def columns() -> Iterator[Column]:
    """A column for each figure of a rung."""
    yield Column("rung")
    yield Column("p50", "ms", right=True)
    yield Column("p95", "ms", right=True, wide=True)
    for part in PARTS:
        yield Column(part, "ms", right=True, wide=part == "step")
    yield Column("alone", "ms", right=True)
    yield Column("hidden", "%", right=True)
    yield Column("early", "%", right=True, wide=True)
    yield Column("messages", right=True, wide=True)
    yield Column("sent", "bytes", right=True, wide=True)
    yield Column("vs.\nddp", right=True)
    yield Column("vs.\nfirst", right=True)
    yield Column("loss", right=True, wide=True)
    yield Column("distance\nto ddp", right=True, wide=True)


def candidates_table(model: str) -> Table:
    """A row per rung, with what it changes."""
    return Table(Column("rung"), Column("what it does", wraps=True), rows=candidates(model).items())


def result_texts(rungs: Sequence[RungResult]) -> list[str | Prose | Table]:
    """What the columns mean, a row per rung, and what distorts the figures of one."""
    caveats = [f"  {rung.rung}: {rung.caveat}." for rung in rungs if rung.caveat]
    return [*LEGEND, Table(*columns(), rows=map(row, rungs)), *caveats]


def row(rung: RungResult) -> list[str]:
    seconds = (rung.p50, rung.p95, rung.forward, rung.backward, rung.exposed, rung.step, rung.alone)
    return [
        rung.rung,
        *map(milliseconds_text, seconds),
        f"{100 * rung.hidden:.0f}",
        f"{100 * rung.early_bytes / rung.bytes:.0f}",
        f"{rung.messages}",
        f"{rung.bytes:,}",
        f"{rung.speed_to_ddp:.2f}",
        f"{rung.speed_to_first:.2f}",
        f"{rung.loss:.4f}",
        f"{rung.difference_to_ddp:.1e}" if rung.difference_to_ddp else "0",
    ]


def milliseconds_text(seconds: float) -> str:
    """With as many digits as mean something."""
    return f"{1000 * seconds:.{1 if seconds >= 0.1 else 2}f}"


def fastest_text(rungs: Sequence[RungResult]) -> str:
    """How the fastest rung compares with the first, and with DistributedDataParallel."""
    first, *_, ddp = rungs
    fastest = min(rungs[:-1], key=lambda rung: rung.p50)
    return (
        f"the fastest rung, {fastest.rung}, is {fastest.speed_to_first:.2f} times as fast as "
        f"{first.rung} and {fastest.speed_to_ddp:.2f} times as fast as {ddp.rung}"
    )


def plot(rungs: Sequence[RungResult], title: str, file: Path) -> None:
    """A bar per rung: the parts of a step, on top of each other."""
    figure, axes = plots.new_axes(title, "", "ms per step")
    names, heights = [rung.rung for rung in rungs], [0.0] * len(rungs)
    for part in PARTS:
        times = [1000 * float(getattr(rung, part)) for rung in rungs]
        axes.bar(names, times, 0.7, heights, label="exposed communication" if part == "exposed" else part)
        heights = [height + time for height, time in zip(heights, times, strict=True)]
    figure.legend(loc="outside upper right", ncols=len(PARTS))
    plots.save(figure, file)
