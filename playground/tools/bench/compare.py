"""Two results of the same benchmark: what became faster, what slower, and what differs no more than trials do."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from playground.measurement.environment import Environment
from playground.runtime.errors import UsageError

MUST_AGREE = ("backend", "device", "world_size", "collectives", "dtype", "op")
"""Fields of a result that must be the same in both, or they cannot be compared."""
MIN_TRIALS = 5
"""With fewer of them, their spread is unknown."""

Key = tuple[str, str, int]
"""(collective, algorithm, size in bytes)."""


@dataclass(frozen=True, kw_only=True)
class SavedResult:
    """What a comparison needs of the document that `bench --json` printed."""

    backend: str
    device: str
    world_size: int
    environment: Environment | None
    collectives: list[str]
    dtype: str
    op: str
    times_us: dict[Key, list[float]]
    """Per call, in µs, trial by trial."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One algorithm at one size, in both results."""

    collective: str
    algorithm: str
    size: int
    """Bytes."""
    before_us: float
    """The median of the trials, in µs."""
    after_us: float
    ratio: float
    """after / before."""
    verdict: str
    """faster, slower, no difference, or too few trials."""


def load(file: Path) -> SavedResult:
    """The result in this file. Raises `UsageError` if there is none."""
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--diff {file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(f"--diff {file}: not a result of this benchmark, which bench --json prints") from None


def parse(document: Any) -> SavedResult:
    """Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` for what `bench --json` did not print."""
    settings, environment = document["settings"], document["environment"]
    times_us = {(row["collective"], row["algorithm"], row["size"]): row["times_us"] for row in document["rows"]}
    if document["lesson"] != "bench" or not all(times and min(times) > 0 for times in times_us.values()):
        raise ValueError
    return SavedResult(
        backend=document["backend"], device=document["device"], world_size=document["world_size"],
        environment=None if environment is None else parse_environment(environment),
        collectives=settings["collectives"], dtype=settings["dtype"], op=settings["op"], times_us=times_us,
    )  # fmt: skip


def parse_environment(document: Any) -> Environment:
    known = {field.name for field in fields(Environment)}
    return Environment(**{name: value for name, value in document.items() if name in known})


def compare(before: SavedResult, after: SavedResult) -> list[Change]:
    """What is in both. Raises `UsageError` if they are not results of the same benchmark."""
    for name in MUST_AGREE:
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            raise UsageError(
                f"--diff: {name} is {to_text(one)} in one and {to_text(other)} in the other: it must be the same"
            )
    changes = [
        change(key, times, after.times_us[key]) for key, times in before.times_us.items() if key in after.times_us
    ]
    if not changes:
        raise UsageError("--diff: no algorithm was measured at the same size in both")
    return changes


def to_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def change(key: Key, before: list[float], after: list[float]) -> Change:
    """The medians, their ratio, and whether they differ by more than noise: whether their `spread`s lie apart."""
    verdict = "no difference"
    if min(len(before), len(after)) < MIN_TRIALS:
        verdict = "too few trials"
    elif spread(after)[1] < spread(before)[0]:
        verdict = "faster"
    elif spread(after)[0] > spread(before)[1]:
        verdict = "slower"
    before_us, after_us = statistics.median(before), statistics.median(after)
    collective, algorithm, size = key
    return Change(
        collective=collective, algorithm=algorithm, size=size, before_us=before_us, after_us=after_us,
        ratio=after_us / before_us, verdict=verdict,
    )  # fmt: skip


def spread(times: list[float]) -> tuple[float, float]:
    """From where to where trials of this kind lie: the middle half of them, and no less than the notch of a box plot.

    The notch, in which the median lies with 95 % certainty, would do for trials of one run. But two runs meet the
    machine at different times, and it differs from itself by more than that.
    Source: McGill, Tukey, Larsen: Variations of Box Plots (1978)
    """
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    notch = 1.57 * (upper - lower) / math.sqrt(len(times))
    return min(lower, middle - notch), max(upper, middle + notch)
