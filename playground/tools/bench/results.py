"""The result of a benchmark, and the comparison of two: rows that became faster, slower, or differ no more than trials
do. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles

from playground.measurement import Fields
from playground.measurement.environment import Environment
from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, expect_float, expect_int, expect_list, expect_text, parse_json
from playground.tools.bench.settings import BenchSettings


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm of one collective at one size."""

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
    """Time of the memory, if that was measured, as a percentage of this row's."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All measurements, until the end of the run or its interruption."""

    settings: BenchSettings
    environment: Environment | None
    rows: list[Row]
    error: str | None
    """Cause of an early end; None if the run is complete."""

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
    def suspicions(self) -> list[str]:
        """What no algorithm explains: a size that takes longer than the next larger one, in every trial of both, and
        one rank that is the last in every row. With the check of `doctor` that looks for the cause."""
        found, trusted = [], [row for row in self.rows if row.trials >= MIN_TRIALS]
        for row, larger in pairwise(sorted(trusted, key=lambda row: (row.collective, row.algorithm, row.size))):
            is_next = (row.collective, row.algorithm) == (larger.collective, larger.algorithm)
            if is_next and min(row.times_us) > max(larger.times_us):
                what = f"{row.collective} by {row.algorithm}: {row.size:,} bytes take longer than {larger.size:,}"
                found.append(f"{what}, see doctor --check threads,cores.")
        alike = [row for row in trusted if row.root == -1]  # elsewhere one rank has to be the last
        last = {row.slowest_rank if row.slowest_percent >= ALWAYS else -1 for row in alike}
        if len(last) == 1 and -1 not in last and len({row.algorithm for row in alike}) > 1 and len(alike) >= MIN_ROWS:
            found.append(f"Rank {last.pop()} is the last in every row, see doctor --check threads,cores on its host.")
        return found

    @property
    def document(self) -> dict[str, object]:
        """Content of the JSON document, beside the fields of every document."""
        return {
            "environment": self.environment,
            "settings": self.settings.document,
            "rows": self.rows,
            "average_busbw": self.average_busbw,
            "complete": self.error is None,
            "error": self.error,
        }


ALWAYS, MIN_ROWS = 90.0, 4
"""Percent of the trials in which a rank is the last, and number of rows, from which on that is no chance."""
MUST_AGREE = ("backend", "device", "world_size", "dtype", "op")
"""Fields of a result that must be the same in both, or they cannot be compared."""
MIN_TRIALS = 5
"""With fewer of them, ranges are too often apart by chance."""
SHORTEST, LONGEST = 1e-9, 1e15
"""Times that can be compared, in µs."""

Key = tuple[str, str, int]
"""(collective, algorithm, size in bytes)."""


@dataclass(frozen=True, kw_only=True)
class SavedResult:
    """The part of a document printed by `bench --json` that a comparison needs."""

    backend: str
    device: str
    world_size: int
    environment: Environment | None
    dtype: str
    op: str
    times_us: dict[Key, list[float]]
    """Per call, in µs, trial by trial."""


ComparedRow = Fields
"""`collective`, `algorithm` and `size` in bytes. Of a row that both results have also, in µs, the medians `before_us`
and `after_us`, the ranges of the middle 95 % of the trials, `before_range_us` and `after_range_us`, the `ratio` after /
before, and the `verdict`: faster, slower, no difference, or too few trials."""


def load(file: Path) -> SavedResult:
    """The result in this file. Raises `UsageError` if there is none."""
    try:
        if file.is_char_device():
            raise ValueError("a device may never end")
        return parse_result(parse_json(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--diff {file}: {error.strerror}") from None
    except (ValueError, KeyError):
        raise UsageError(f"--diff {file}: not a result of this benchmark, use what bench --json printed") from None


def parse_result(content: object) -> SavedResult:
    """Raises `ValueError` or `KeyError` for what `bench --json` did not print."""
    document = expect_dict(content)
    settings, environment = expect_dict(document["settings"]), document["environment"]
    times_us = dict(map(parse_row, map(expect_dict, expect_list(document["rows"]))))
    if document["lesson"] != "bench" or not all(times_us.values()):
        raise ValueError
    return SavedResult(
        backend=expect_text(document["backend"]),
        device=expect_text(document["device"]),
        world_size=expect_int(document["world_size"], 1),
        environment=None if environment is None else parse_environment(expect_dict(environment)),
        dtype=expect_text(settings["dtype"]),
        op=expect_text(settings["op"]),
        times_us=times_us,
    )


def parse_row(row: dict[str, object]) -> tuple[Key, list[float]]:
    key = expect_text(row["collective"]), expect_text(row["algorithm"]), expect_int(row["size"], 0)
    return key, [expect_float(time, SHORTEST, LONGEST) for time in expect_list(row["times_us"])]


def parse_environment(document: dict[str, object]) -> Environment:
    libraries = {name: document.get(name) for name in ("cuda", "nccl", "driver")}
    return Environment(
        hardware=expect_text(document["hardware"]),
        cores=expect_int(document["cores"], 0),
        memory=expect_int(document["memory"], 0),
        gpus=[expect_text(gpu) for gpu in expect_list(document["gpus"])],
        os=expect_text(document["os"]),
        python=expect_text(document["python"]),
        torch=expect_text(document["torch"]),
        **{name: None if version is None else expect_text(version) for name, version in libraries.items()},
    )


def compare(before: SavedResult, after: SavedResult) -> dict[str, list[ComparedRow]]:
    """Two results row by row: `rows` that both have, those that the later one lacks (`only_before`) or the earlier one
    (`only_after`). Raises `UsageError` if they are not results of the same benchmark."""
    for name in MUST_AGREE:
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            raise UsageError(f"--diff: {name} is {one} in one and {other} in the other: it must be the same")
    in_both = [key for key in before.times_us if key in after.times_us]
    changes = [compare_rows(key, before.times_us[key], after.times_us[key]) for key in in_both]
    if not changes:
        raise UsageError("--diff: no algorithm was measured at the same size in both, so there is nothing to compare")
    only_before, only_after = (
        [name_row(key) for key in one.times_us if key not in other.times_us]
        for one, other in ((before, after), (after, before))
    )
    return {"rows": changes, "only_before": only_before, "only_after": only_after}


def name_row(key: Key) -> ComparedRow:
    return dict(zip(("collective", "algorithm", "size"), key, strict=True))


def compare_rows(key: Key, before: list[float], after: list[float]) -> ComparedRow:
    """The medians, their ratio, and whether they differ by more than noise does: whether the `spread`s lie apart."""
    verdict, before_range, after_range = "no difference", spread(before), spread(after)
    if min(len(before), len(after)) < MIN_TRIALS:
        verdict = "too few trials"
    elif after_range[1] < before_range[0]:
        verdict = "faster"
    elif after_range[0] > before_range[1]:
        verdict = "slower"
    medians = {"before_us": median(before), "after_us": median(after)}
    ranges = {"before_range_us": before_range, "after_range_us": after_range}
    ratio = medians["after_us"] / medians["before_us"]
    return name_row(key) | medians | ranges | {"ratio": ratio, "verdict": verdict}


def spread(times_us: list[float]) -> tuple[float, float]:
    """From where to where the middle 95 % of the trials lie. Trials are spread over a run, so this holds most of what
    the machine does to a run. Narrower ranges, as between quartiles, call equal runs different on a host that is busy;
    with all trials, one that something interrupted would hide any difference."""
    fortieths = quantiles(times_us, n=40, method="inclusive") if len(times_us) > 1 else times_us
    return fortieths[0], fortieths[-1]
