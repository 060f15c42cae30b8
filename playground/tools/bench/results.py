"""The rows of a benchmark: their averages, and the comparison of two results. Does not import
torch.

A row is one algorithm of one collective at one size:

| values                        | what they are                                                                        |
|-------------------------------|--------------------------------------------------------------------------------------|
| size, count                   | bytes, as nccl-tests counts them; elements of the tensor, or of a rank's share of it |
| time_us = p50_us, p95, p99    | per call, in µs: percentiles of the trials, each on its slowest rank                 |
| algbw, busbw                  | GB/s: size / time; what a link carries for that, comparable between worlds           |
| trials, calls, times_us       | number of trials; calls in a row, per trial; time per call of each trial, in µs      |
| type, redop, root             | data type; reduction, or "none"; root, -1 where all ranks do the same                |
| wrong                         | elements of the results that are not what they must be, on all ranks together        |
| slowest_rank, slowest_percent | the rank that took longest in most trials, and in how many of them it did            |
| rank_us                       | per call, in µs: each rank's own median, in rank order                               |
| limit_percent                 | time of the memory, if that was measured, as a percentage of this row's; else None   |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from playground.measurement import Fields
from playground.runtime.errors import UsageError

MUST_AGREE = ("backend", "device", "world_size", "dtype", "op")
"""Fields of a result that must be the same in both, or they cannot be compared."""
MIN_TRIALS = 5
"""With fewer of them, ranges are too often apart by chance."""
NAMES = ("collective", "algorithm", "size")
Key = tuple[Any, ...]
"""The values of a row that name it."""


def average_busbw(rows: Sequence[Fields]) -> dict[str, dict[str, float]]:
    """GB/s by collective and algorithm: the mean over all sizes."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values.setdefault(row["collective"], {}).setdefault(row["algorithm"], []).append(
            row["busbw"]
        )
    return {
        name: {each: mean(values) for each, values in found.items()}
        for name, found in values.items()
    }


def load(file: Path) -> Fields:
    """The result in this file, as far as a comparison needs it: `MUST_AGREE`, and `times_us`, the
    trials of each row by its `Key`. Raises `UsageError` if there is none."""
    try:
        return parse_result(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--diff {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError):
        raise UsageError(
            f"--diff {file}: not a result of this benchmark, use what bench --json printed"
        ) from None


def parse_result(document: Fields) -> Fields:
    """Raises `ValueError`, `KeyError`, `TypeError` or `ArithmeticError` for what `bench --json` did
    not print."""
    about = document | document["settings"]
    times_us = {
        tuple(row[name] for name in NAMES): [*map(float, row["times_us"])]
        for row in document["rows"]
    }
    if document["lesson"] != "bench" or not all(
        times and min(times) > 0 for times in times_us.values()
    ):
        raise ValueError
    return {name: about[name] for name in MUST_AGREE} | {"times_us": times_us}


def compare(before: Fields, after: Fields) -> list[Fields]:
    """Two results row by row, those that both have. Raises `UsageError` if they are not results of
    the same benchmark."""
    for name in MUST_AGREE:
        if before[name] != after[name]:
            differs = f"{name} is {before[name]} in one and {after[name]} in the other"
            raise UsageError(f"--diff: {differs}: it must be the same")
    old, new = before["times_us"], after["times_us"]
    changes = [compare_rows(key, old[key], new[key]) for key in old if key in new]
    if not changes:
        raise UsageError(
            "--diff: no algorithm was measured at the same size in both, so there is nothing to "
            "compare"
        )
    return changes


def compare_rows(key: Key, before: list[float], after: list[float]) -> Fields:
    """The comparison of a row, by name: the medians in µs, the ranges of the middle 95 % of the
    trials, the `ratio` of after to before, and as the `verdict` whether they differ by more than
    noise does: whether the ranges lie apart."""
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
    return (
        dict(zip(NAMES, key, strict=True)) | medians | ranges | {"ratio": ratio, "verdict": verdict}
    )


def spread(times_us: list[float]) -> tuple[float, float]:
    """From where to where the middle 95 % of the trials lie. Trials are spread over a run, so this
    holds most of what the machine does to a run. Narrower ranges, as between quartiles, call equal
    runs different on a host that is busy; with all trials, one that something interrupted would
    hide any difference."""
    fortieths = quantiles(times_us, n=40, method="inclusive") if len(times_us) > 1 else times_us
    return fortieths[0], fortieths[-1]
