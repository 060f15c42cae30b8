"""What the parameter server came to, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from playground.console import plots
from playground.console.tables import Column, Table
from playground.console.text import Prose, heading, prose
from playground.lessons.parameter_server.results import MistakeResult, ModeResult
from playground.lessons.parameter_server.settings import ALL_REDUCE, MODES

BAR = 24
"""Characters of the longest bar of a histogram."""
SHOWN = len("is at version 2; expected version 1 instead")
"""Characters of an error in a table, from its end."""
LARGEST = 8
"""Staleness from which on gradients are counted together."""


def modes_table(modes: Sequence[str]) -> Table:
    """A row per mode, with what it does."""
    rows = [(ALL_REDUCE, "no server: the workers average their gradients"), *((mode, MODES[mode]) for mode in modes)]
    return Table(Column("mode"), Column("what it does", wraps=True), rows=rows)


def mistake_texts(met: Sequence[MistakeResult]) -> Iterator[str | Prose | Table]:
    """What each worker of the published server met."""
    yield prose(
        heading("the mistake"), ": the workers' forward passes run through the server's own parameters; worker 0 goes "
        "backward and steps, then the others go backward."
    )  # fmt: skip
    table = Table(
        Column("worker", right=True), Column("version\nread", right=True), Column("version\nfound", right=True),
        Column("backward", wraps=True),
    )  # fmt: skip
    for each in met:
        outcome = f"fails: … {each.error[-SHOWN:]}" if each.error else "goes well"
        table.add(str(each.worker), str(each.version_read), str(each.version_found), outcome)
    yield table
    if errors := [each.error for each in met if each.error]:
        yield f"In full: {errors[0]}."


def result_texts(modes: Sequence[ModeResult]) -> Iterator[str | Prose | Table]:
    """What came of each mode; the loss as it fell; how old the gradients were."""
    yield prose(heading("the right one"), ": each worker computes on a copy of its own; the server adds and steps.")
    yield summary_table(modes)
    yield from (loss_text(each) for each in modes if each.lost_workers)
    yield ""
    yield "loss, and the seconds after which it was reached, by the share of gradients:"
    yield curve_table(modes)
    if any(max(each.staleness) for each in modes):
        yield ""
        yield "staleness: how many steps the server had taken since the worker got its copy"
        yield histogram(modes)


def loss_text(mode: ModeResult) -> Prose:
    """Which workers died in this mode or before it, and when."""
    total = sum(mode.gradients_by_worker)
    lost = (
        f"worker {worker} was lost after {taken} of {total} gradients ({mode.gradients_by_worker[worker]} of its own)"
        if taken
        else f"worker {worker} had been lost before"
        for worker, taken in mode.lost_workers.items()
    )
    return prose(f"{mode.mode}: ", ", ".join(lost), "; the others computed the rest.")


def summary_table(modes: Sequence[ModeResult]) -> Table:
    """A row per mode."""
    table = Table(
        Column("mode"), Column("speed", "samples/s", right=True), Column("time", "s", right=True),
        Column("last\nloss", right=True), Column("test", "%", right=True), Column("mean\nstaleness", right=True),
        Column("busiest\nrank", "bytes/step", right=True), Column("gradients\nby worker", wide=True),
        Column("distance to\nall-reduce", wide=True, right=True),
    )  # fmt: skip
    for each in modes:
        table.add(
            each.mode, f"{each.samples_per_second:,.0f}", f"{each.seconds:.2f}", f"{each.points[-1].loss:.3f}",
            f"{100 * each.test_accuracy:.1f}", f"{each.mean_staleness:.2f}", f"{each.bytes_per_step:,}",
            " ".join(map(str, each.gradients_by_worker)), f"{each.difference_to_all_reduce:.1e}",
        )  # fmt: skip
    return table


def curve_table(modes: Sequence[ModeResult]) -> Table:
    """The loss of every mode, with the seconds that it took."""
    table = Table(Column("done", "%", right=True), *(Column(each.mode, right=True) for each in modes))
    count = len(modes[0].points)
    for number, points in enumerate(zip(*(each.points for each in modes), strict=True), 1):
        cells = [f"{point.loss:.3f} {point.seconds:6.2f}" for point in points]
        table.add(f"{100 * number / count:.0f}", *cells)
    return table


def histogram(modes: Sequence[ModeResult]) -> Table:
    """A bar per staleness, for every mode that has any."""
    stale = [each for each in modes if max(each.staleness)]
    counts = [binned(each.staleness) for each in stale]
    table = Table(Column("staleness", right=True), *(Column(each.mode) for each in stale))
    largest = max(max(each) for each in counts)
    for number in range(max(map(len, counts))):
        name = str(number) if number < LARGEST else f"{LARGEST} or more"
        here = [each[number] if number < len(each) else 0 for each in counts]
        table.add(name, *(f"{'█' * round(BAR * count / largest)} {count}".strip() for count in here))
    return table


def binned(staleness: dict[int, int]) -> list[int]:
    """How many gradients were so stale, from 0 on; the last number is of all that were `LARGEST` or more."""
    counts = [0] * (min(max(staleness), LARGEST) + 1)
    for steps, count in staleness.items():
        counts[min(steps, LARGEST)] += count
    return counts


def plot(modes: Sequence[ModeResult], title: str, file: Path) -> None:
    """The loss of every mode against time."""
    figure, axes = plots.new_axes(title, "seconds", "loss")
    for each in modes:
        axes.plot([point.seconds for point in each.points], [point.loss for point in each.points], label=each.mode)
    axes.legend()
    plots.save(figure, file)
