"""Two results of the same benchmark: what became faster, what slower, and what differs no more than trials do."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from playground.runtime.errors import Impossible

SAME = ("backend", "device", "world_size")
SAME_SETTINGS = ("collectives", "dtype", "op")
"""In both results, or they cannot be compared."""
FEWEST = 5
"""Trials below which their spread is unknown."""


def load(file: Path) -> dict[str, Any]:
    """The result in this file. Raises `Impossible` if it is none."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        trials = [row["times_us"] for row in result["rows"] if key(row)]
        fields = {*SAME, "environment"} <= result.keys() and set(SAME_SETTINGS) <= result["settings"].keys()
        timed = all(map(len, trials)) and all(time > 0 for times in trials for time in times)
        if result["lesson"] != "bench" or not fields or not timed:
            raise ValueError
    except OSError as error:
        raise Impossible(f"--diff {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Impossible(f"--diff {file}: not a result of this benchmark, which bench --json prints") from None
    return dict(result)


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["collective"], row["algorithm"], row["size"]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for whatever is in both. Raises `Impossible` if they are not results of the same benchmark."""
    pairs = [(name, before[name], after[name]) for name in SAME]
    pairs += [(name, before["settings"][name], after["settings"][name]) for name in SAME_SETTINGS]
    for name, one, other in pairs:
        if one != other:
            raise Impossible(
                f"--diff: {name} is {said(one)} in one and {said(other)} in the other: it must be the same"
            )
    afters = {key(row): row["times_us"] for row in after["rows"]}
    common = [(row, afters[key(row)]) for row in before["rows"] if key(row) in afters]
    if not common:
        raise Impossible("--diff: no algorithm was measured at the same size in both")
    return [
        {**dict(zip(("collective", "algorithm", "size"), key(row), strict=True)), **change(row["times_us"], times)}
        for row, times in common
    ]


def said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def change(before: list[float], after: list[float]) -> dict[str, Any]:
    """The medians, their ratio, and whether they differ by more than noise: whether their `spread`s lie apart."""
    one, other = statistics.median(before), statistics.median(after)
    verdict = "no difference"
    if min(len(before), len(after)) < FEWEST:
        verdict = "too few trials"
    elif spread(after)[1] < spread(before)[0]:
        verdict = "faster"
    elif spread(after)[0] > spread(before)[1]:
        verdict = "slower"
    return {"before_us": one, "after_us": other, "ratio": other / one, "verdict": verdict}


def spread(times: list[float]) -> tuple[float, float]:
    """From where to where trials of this kind lie: the middle half of them, and no less than the notch of a box plot.

    The notch, in which the median lies with 95 % certainty, would do for trials of one run. But two runs meet the
    machine at different times, and it differs from itself by more than that.
    Source: McGill, Tukey, Larsen: Variations of Box Plots (1978)
    """
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    notch = 1.57 * (upper - lower) / math.sqrt(len(times))
    return min(lower, middle - notch), max(upper, middle + notch)
