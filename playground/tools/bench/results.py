"""The rows of a benchmark: their averages, and the comparison of two results. Does not import torch.

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

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles

from playground.measurement import Fields
from playground.measurement.environment import describe_in_a_line
from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, expect_float, expect_int, expect_list, expect_text, parse_json

MUST_AGREE = ("backend", "device", "world_size", "dtype", "op")
"""Fields of a result that must be the same in both, or they cannot be compared."""
MIN_TRIALS = 5
"""With fewer of them, ranges are too often apart by chance."""
SHORTEST, LONGEST = 1e-9, 1e15
"""Times that can be compared, in µs."""

Key = tuple[str, str, int]
"""(collective, algorithm, size in bytes)."""


def average_busbw(rows: Sequence[Fields]) -> dict[str, dict[str, float]]:
    """GB/s by collective and algorithm: the mean over all sizes."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values.setdefault(row["collective"], {}).setdefault(row["algorithm"], []).append(row["busbw"])
    return {name: {each: mean(values) for each, values in found.items()} for name, found in values.items()}


def load(file: Path) -> Fields:
    """The result in this file, as far as a comparison needs it: `MUST_AGREE`, the `environment` in a line, and
    `times_us`, the trials of each row by its `Key`. Raises `UsageError` if there is none."""
    try:
        if file.is_char_device():
            raise ValueError("a device may never end")
        return parse_result(parse_json(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--diff {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError):
        raise UsageError(f"--diff {file}: not a result of this benchmark, use what bench --json printed") from None


def parse_result(content: object) -> Fields:
    """Raises `ValueError`, `KeyError`, `TypeError` or `ArithmeticError` for what `bench --json` did not print."""
    document = expect_dict(content)
    settings, environment = expect_dict(document["settings"]), document["environment"]
    times_us = dict(map(parse_row, map(expect_dict, expect_list(document["rows"]))))
    if document["lesson"] != "bench" or not all(times_us.values()):
        raise ValueError
    texts = {name: expect_text(document[name]) for name in ("backend", "device")}
    texts |= {name: expect_text(settings[name]) for name in ("dtype", "op")}
    where = environment and describe_in_a_line(expect_dict(environment))
    return {**texts, "world_size": expect_int(document["world_size"], 1), "environment": where, "times_us": times_us}


def parse_row(row: dict[str, object]) -> tuple[Key, list[float]]:
    key = expect_text(row["collective"]), expect_text(row["algorithm"]), expect_int(row["size"], 0)
    return key, [expect_float(time, SHORTEST, LONGEST) for time in expect_list(row["times_us"])]


def compare(before: Fields, after: Fields) -> dict[str, list[Fields]]:
    """Two results row by row: `rows` that both have, those that the later one lacks (`only_before`) or the earlier one
    (`only_after`). Raises `UsageError` if they are not results of the same benchmark."""
    for name in MUST_AGREE:
        if before[name] != after[name]:
            differs = f"{name} is {before[name]} in one and {after[name]} in the other"
            raise UsageError(f"--diff: {differs}: it must be the same")
    old, new = before["times_us"], after["times_us"]
    changes = [compare_rows(key, old[key], new[key]) for key in old if key in new]
    if not changes:
        raise UsageError("--diff: no algorithm was measured at the same size in both, so there is nothing to compare")
    only_before = [name_row(key) for key in old if key not in new]
    return {"rows": changes, "only_before": only_before, "only_after": [name_row(key) for key in new if key not in old]}


def name_row(key: Key) -> Fields:
    return dict(zip(("collective", "algorithm", "size"), key, strict=True))


def compare_rows(key: Key, before: list[float], after: list[float]) -> Fields:
    """The comparison of a row, by name: the medians in µs, the ranges of the middle 95 % of the trials, the `ratio` of
    after to before, and as the `verdict` whether they differ by more than noise does: whether the ranges lie apart."""
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
