"""A benchmark as text while it runs, as CSV and as a figure; and two of them beside each other."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from playground.console import plots
from playground.measurement.environment import Environment
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.tools.bench.compare import Change, SavedResult
from playground.tools.bench.results import BenchResult, BenchStart, Limit, Row, SizeResult, WireRow
from playground.tools.bench.settings import BenchSettings

COLUMNS = (
    ("collective", "", "<15"), ("algorithm", "", "<18"), ("size", "(B)", ">12"), ("count", "(elements)", ">12"),
    ("type", "", ">9"), ("redop", "", ">6"), ("root", "", ">5"), ("time_us", "(us)", ">11.1f"),
    ("algbw", "(GB/s)", ">9.3f"), ("busbw", "(GB/s)", ">9.3f"), ("wrong", "", ">8"), ("p50_us", "(us)", ">11.1f"),
    ("p95_us", "(us)", ">11.1f"), ("p99_us", "(us)", ">11.1f"), ("limit_percent", "(%)", ">7.1f"),
)  # fmt: skip
"""Of the table and of the CSV: field of a `Row`, unit, format."""
TITLES = {"time_us": "time", "p50_us": "p50", "p95_us": "p95", "p99_us": "p99", "wrong": "#wrong"}
TITLES["limit_percent"] = "%limit"


class ReportPrinter:
    """Takes what rank 0 reports, prints it at once, and keeps it: when the run is interrupted, that is the result."""

    def __init__(self, say: Callable[[str], None], world: World, settings: BenchSettings) -> None:
        self.say, self.world, self.settings = say, world, settings
        self.environment: Environment | None = None
        self.wire: str | None = None
        self.rows: list[Row] = []
        self.wire_rows: list[WireRow] = []
        self.columns = [column for column in COLUMNS if column[0] != "limit_percent" or settings.limit]

    def __call__(self, rank: int, event: Mapping[str, object]) -> None:
        match event:
            case {"start": BenchStart() as start}:
                self.environment, self.wire = start.environment, start.wire
                self.say("\n".join(f"# {line}" for line in self.head(start)))
            case {"measured": SizeResult() as measured}:
                for row in measured.rows:
                    self.rows.append(row)
                    self.say("  " + "".join(f"{getattr(row, name):{form}}" for name, _, form in self.columns))
                if measured.wire:
                    self.wire_rows.append(measured.wire)

    def head(self, start: BenchStart) -> list[str]:
        """What was measured on, how, and the names of the columns."""
        lines = [
            f"bench: {self.world}",
            str(start.environment),
            f"{self.settings.iterations} trials per size after {self.settings.warmup} warm-up calls; "
            f"time: the median of the trials, each on its slowest rank",
        ]
        if start.wire:
            lines.append(f"%limit: busbw, relative to {start.wire}")
        lines.append("".join(f"{TITLES.get(name, name):{width(form)}}" for name, _, form in self.columns))
        lines.append("".join(f"{unit:{width(form)}}" for _, unit, form in self.columns).rstrip())
        return lines

    def result(self, complete: bool) -> BenchResult:
        """What was reported so far."""
        return BenchResult(
            settings=self.settings, environment=self.environment, rows=self.rows,
            limit=Limit(what=self.wire, rows=self.wire_rows) if self.wire else None, complete=complete,
        )  # fmt: skip


def width(form: str) -> str:
    """A number's format without its decimals: that of the title above it."""
    return form.partition(".")[0]


def averages_text(result: BenchResult) -> str:
    return "\n".join(
        f"# Avg bus bandwidth, {collective} by {algorithm}: {busbw:.3f} GB/s"
        for collective, algorithms in result.average_busbw.items()
        for algorithm, busbw in algorithms.items()
    )


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """One line per row, under the names that JSON has for the fields."""
    try:
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, [name for name, _, _ in COLUMNS], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(map(vars, rows))
    except OSError as error:
        raise UsageError(f"--csv {file} cannot be written: {error.strerror}") from None


def bandwidth_plot(title: str, result: BenchResult, file: Path) -> None:
    """Bus bandwidth over size: a line for each collective and algorithm, and one for the wire if it was measured."""
    figure, axes = plots.new_axes(title, "size (bytes)", "bus bandwidth (GB/s)")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        lines.setdefault(f"{row.collective} {row.algorithm}", []).append((row.size, row.busbw))
    for wire_row in result.limit.rows if result.limit else []:
        lines.setdefault(f"limit ({wire_row.collective})", []).append((wire_row.size, wire_row.busbw))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle=":" if "limit" in label else "-")
    axes.set_xscale("log", base=2)
    axes.legend()
    plots.save(figure, file)


def difference_text(changes: Sequence[Change], before: SavedResult, after: SavedResult) -> str:
    """Two results beside each other."""
    lines = []
    if before.environment != after.environment:
        results = ("before", before), ("after", after)
        lines += [f"# {name}: {result.environment}" for name, result in results if result.environment]
    lines.append(f"# {'collective':15}{'algorithm':18}{'size':>12}{'before':>12}{'after':>12}{'ratio':>8}")
    lines.append(f"# {'':15}{'':18}{'(B)':>12}{'(us)':>12}{'(us)':>12}")
    lines += [
        f"  {change.collective:15}{change.algorithm:18}{change.size:12}{change.before_us:12.1f}{change.after_us:12.1f}"
        f"{change.ratio:8.2f}  {change.verdict}"
        for change in changes
    ]
    return "\n".join(lines)
