"""What the ladder measured, as text: a row per rung, what its columns mean; and as a figure: a bar per rung."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from playground.console import plots
from playground.console.tables import table
from playground.lessons.ladder.results import PARTS, RungResult
from playground.lessons.ladder.settings import CANDIDATES

COLUMNS = (
    "rung", "p50", "p95", *PARTS, "alone", "hidden", "early", "messages", "bytes", "x first", "x ddp", "loss",
    "off ddp",
)  # fmt: skip
LEGEND = """\
  p50, p95: ms per step on its slowest rank. Its parts, medians on the rank that came last to the averaging: forward;
  backward, to the last gradient; exposed, from there until all are averaged (packing, waiting); step.
  alone: ms the same averaging takes with no backward to hide behind; hidden: the share of it that was not exposed;
  early: the share of the bytes that leave before the last gradient is ready, without which nothing can be hidden.
  x first, x ddp: how many times as fast as the first rung, as ddp. off ddp: largest difference of parameters to ddp's,
  which is rounding; where rounding decides which of two numbers is the larger (ReLU, max_pool), it grows."""


def candidates_text() -> str:
    """A line per rung, with what it changes."""
    return "\n".join(table([[name, summary] for name, summary in CANDIDATES.items()]))


def table_text(rungs: Sequence[RungResult]) -> str:
    """A row per rung, and what the columns mean."""
    return "\n".join([*table([COLUMNS, *map(row, rungs)], first_right=1), LEGEND])


def row(rung: RungResult) -> list[str]:
    seconds = (rung.p50, rung.p95, rung.forward, rung.backward, rung.exposed, rung.step, rung.alone)
    return [
        rung.rung,
        *(f"{1000 * each:.2f}" for each in seconds),
        f"{rung.hidden:.0%}",
        f"{rung.early_bytes / rung.bytes:.0%}",
        f"{rung.messages}",
        f"{rung.bytes:,}",
        f"{rung.speed_to_first:.2f}",
        f"{rung.speed_to_ddp:.2f}",
        f"{rung.loss:.4f}",
        f"{rung.difference_to_ddp:.1e}" if rung.difference_to_ddp else "0",
    ]


def fastest_text(rungs: Sequence[RungResult]) -> str:
    """How the fastest rung compares with the first, and with DistributedDataParallel."""
    first, *_, ddp = rungs
    fastest = min(rungs[:-1], key=lambda rung: rung.p50)
    return (
        f"the fastest here, {fastest.rung}, is {fastest.speed_to_first:.2f} times as fast as "
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
