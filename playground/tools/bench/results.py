"""What a benchmark measured. Plain data: reading it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from playground.measurement.environment import Environment
from playground.tools.bench.settings import BenchSettings


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How fast one call is at one size."""

    size: int
    """Bytes, counted as nccl-tests counts them for the collective."""
    time_us: float
    """Per call, in µs: the median of the trials, each on its slowest rank."""
    algbw: float
    """GB/s: size / time."""
    busbw: float
    """GB/s: what a link carries for that, so that figures of different collectives and worlds can be compared."""
    p50_us: float
    p95_us: float
    p99_us: float
    trials: int
    calls: int
    """In a row, per trial."""
    times_us: list[float]
    """Per call, in µs, by trial, each on its slowest rank."""


@dataclass(frozen=True, kw_only=True)
class Row(Figures):
    """One algorithm of one collective at one size."""

    collective: str
    count: int
    """Elements of the tensor, or of a rank's share of it."""
    type: str
    redop: str
    """The reduction, or "none"."""
    root: int
    """The rank at the root; -1 where all ranks do the same."""
    algorithm: str
    wrong: int
    """Elements of the results that are not what they must be, on all ranks together."""
    slowest_rank: int
    """The rank that took longest in most trials."""
    slowest_percent: float
    """In how many of them it did."""
    rank_us: list[float]
    """Per call, in µs: each rank's own median, in rank order."""
    limit_percent: float | None
    """busbw as a percentage of the wire's, if that was measured."""


@dataclass(frozen=True, kw_only=True)
class WireRow(Figures):
    """The wire itself, beside a collective at one size."""

    collective: str


@dataclass(frozen=True, kw_only=True)
class BenchStart:
    """What rank 0 reports before anything is measured."""

    environment: Environment
    wire: str | None
    """What the wire is, if it is measured."""


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """What rank 0 reports of a collective at one size, in each pass: all its trials so far."""

    collective: str
    size: int
    """Bytes."""
    rows: list[Row]
    """One per algorithm."""
    wire: WireRow | None
    complete: bool
    """Whether there are no more trials to come."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The wire itself: what collectives are held against."""

    what: str
    rows: list[WireRow]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What was measured until the end, or until something ended the run."""

    settings: BenchSettings
    environment: Environment | None
    rows: list[Row]
    limit: Limit | None
    error: str | None
    """What ended the run before its end; None if nothing did."""

    @property
    def complete(self) -> bool:
        """Whether every row has all its trials."""
        return self.error is None

    @property
    def average_busbw(self) -> Mapping[str, Mapping[str, float]]:
        """GB/s by collective and algorithm: the mean over all sizes."""
        values: dict[str, dict[str, list[float]]] = {}
        for row in self.rows:
            values.setdefault(row.collective, {}).setdefault(row.algorithm, []).append(row.busbw)
        return {name: {each: mean(values) for each, values in found.items()} for name, found in values.items()}

    @property
    def wrong(self) -> int:
        """Elements that are wrong, in all results together."""
        return sum(row.wrong for row in self.rows)

    @property
    def document(self) -> dict[str, object]:
        """What the JSON document holds beside what every document does."""
        return {
            "environment": self.environment, "settings": self.settings.document, "rows": self.rows,
            "average_busbw": self.average_busbw, "limit": self.limit, "complete": self.complete,
            "error": self.error,
        }  # fmt: skip
