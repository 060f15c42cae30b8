"""The rows of a benchmark: their averages, and the comparison of two results. Does not import
torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from playground.base.errors import UsageError

MUST_AGREE = ("backend", "device", "world_size", "dtype", "op")
"""Fields of a result that must be the same in both, or they cannot be compared."""
MIN_TRIALS = 5
"""With fewer of them, ranges are too often apart by chance."""
Key = tuple[str, str, int]
"""The values of a row that name it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm of one collective at one size."""

    collective: str
    algorithm: str
    size: int
    """Bytes, as nccl-tests counts them."""
    count: int
    """Elements of the tensor, or of a rank's share of it."""
    type: str
    """Data type."""
    redop: str
    """Reduction, or "none"."""
    root: int
    """The rank at the root, -1 where all ranks do the same."""
    algbw: float
    """GB/s: size / time."""
    busbw: float
    """GB/s: what a link carries for that, comparable between worlds."""
    p50_us: float
    p95_us: float
    p99_us: float
    """Time per call, in µs: percentiles of the trials, each on its slowest rank."""
    trials: int
    """Number of trials."""
    calls: int
    """Calls in a row, per trial."""
    times_us: Sequence[float]
    """Time per call of each trial, in µs."""
    wrong: int
    """Elements of the results that are not what they must be, on all ranks together."""
    slowest_rank: int
    """The rank that took longest in most trials."""
    slowest_percent: float
    """In how many of the trials it did."""
    rank_us: Sequence[float]
    """Time per call, in µs: each rank's own median, in rank order."""
    limit_percent: float | None
    """Time of the memory as a percentage of this row's; None if it was not measured."""

    @property
    def time_us(self) -> float:
        """The time of a row, in µs: the median."""
        return self.p50_us

    @property
    def values(self) -> dict[str, object]:
        """By name, as --json and tables show them: with the time."""
        return vars(self) | {"time_us": self.time_us}


@dataclass(frozen=True, kw_only=True)
class SavedResult:
    """The result of an earlier run, as far as a comparison needs it: `MUST_AGREE`, and trials."""

    about: dict[str, object]
    times_us: dict[Key, list[float]]
    """Time per call of each trial, in µs, by row."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A row before and after. Times are in µs."""

    collective: str
    algorithm: str
    size: int
    before_us: float
    after_us: float
    """Medians."""
    before_range_us: tuple[float, float]
    after_range_us: tuple[float, float]
    """Ranges of the middle 95 % of the trials."""
    ratio: float
    """Time after, over time before."""
    verdict: str
    """Whether they differ by more than noise does: whether the ranges lie apart."""


def average_busbw(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """GB/s by collective and algorithm: the mean over all sizes."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values.setdefault(row.collective, {}).setdefault(row.algorithm, []).append(row.busbw)
    return {
        name: {each: mean(values) for each, values in found.items()}
        for name, found in values.items()
    }


def load(file: Path) -> SavedResult:
    """The result in this file. Raises `UsageError` if there is none."""
    try:
        return parse_result(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--diff {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError):
        raise UsageError(
            f"--diff {file}: not a result of this benchmark, use what bench --json printed"
        ) from None


def parse_result(document: Any) -> SavedResult:
    """Raises `ValueError`, `KeyError`, `TypeError` or `ArithmeticError` for what `bench --json` did
    not print."""
    about = document | document["settings"]
    times_us = {
        (row["collective"], row["algorithm"], row["size"]): [*map(float, row["times_us"])]
        for row in document["rows"]
    }
    are_times = all(times and min(times) > 0 for times in times_us.values())
    if document["lesson"] != "bench" or not are_times:
        raise ValueError
    return SavedResult(about={name: about[name] for name in MUST_AGREE}, times_us=times_us)


def compare(before: SavedResult, after: SavedResult) -> list[Change]:
    """Two results row by row, those that both have. Raises `UsageError` if they are not results of
    the same benchmark."""
    for name in MUST_AGREE:
        old, new = before.about[name], after.about[name]
        if old != new:
            differs = f"{name} is {old} in one and {new} in the other"
            raise UsageError(f"--diff: {differs}: it must be the same")
    later = after.times_us
    changes = [
        compare_rows(key, earlier, later[key])
        for key, earlier in before.times_us.items()
        if key in later
    ]
    if not changes:
        raise UsageError(
            "--diff: no algorithm was measured at the same size in both, so there is nothing to "
            "compare"
        )
    return changes


def compare_rows(key: Key, before: list[float], after: list[float]) -> Change:
    """The comparison of a row, from its trials."""
    verdict, before_range, after_range = "no difference", spread(before), spread(after)
    if min(len(before), len(after)) < MIN_TRIALS:
        verdict = "too few trials"
    elif after_range[1] < before_range[0]:
        verdict = "faster"
    elif after_range[0] > before_range[1]:
        verdict = "slower"
    collective, algorithm, size = key
    return Change(
        collective=collective,
        algorithm=algorithm,
        size=size,
        before_us=median(before),
        after_us=median(after),
        before_range_us=before_range,
        after_range_us=after_range,
        ratio=median(after) / median(before),
        verdict=verdict,
    )


def spread(times_us: list[float]) -> tuple[float, float]:
    """From where to where the middle 95 % of the trials lie. Trials are spread over a run, so this
    holds most of what the machine does to a run. Narrower ranges, as between quartiles, call equal
    runs different on a host that is busy; with all trials, one that something interrupted would
    hide any difference."""
    fortieths = quantiles(times_us, n=40, method="inclusive") if len(times_us) > 1 else times_us
    return fortieths[0], fortieths[-1]
