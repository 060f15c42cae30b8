"""Results as text, and as one JSON document. Plain data in, strings out."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from playground.runtime.entry import World

WIDE = 6
"""From so many columns on, a table shows once, below it, what is the same on every rank."""


def step_text(name: str, about: str, ranks: list[Any], says: str = "") -> str:
    """One step: what it does, then what every rank had before and after, and what each `says` about that."""
    lines = [f"{name}: {about}"]
    if refused := [rank["refused"] for rank in ranks if "refused" in rank]:
        return "\n".join([*lines, f"  the backend refuses: {refused[0]}"])
    lines += rank_table(ranks)
    if says and ranks[0].keys() == {"before", "after"}:
        lines += [says.format(rank=rank, **values) for rank, values in enumerate(ranks)]
    return "\n".join(lines)


def rank_table(ranks: list[dict[str, Any]]) -> list[str]:
    """A row a rank. What is the same on every rank, or is itself a table, stands below."""
    columns = [name for name in ranks[0] if name != "rank"]
    common = {name: ranks[0][name] for name in columns if all(values[name] == ranks[0][name] for values in ranks)}
    below = {name: value for name, value in common.items() if len(columns) >= WIDE or is_table(value)}
    if len(ranks) == 1:
        below = {name: value for name, value in below.items() if is_table(value)}
    columns = [name for name in columns if name not in below]
    rows = [["rank", *columns]]
    rows += [[str(rank), *(cell(values[name]) for name in columns)] for rank, values in enumerate(ranks)]
    lines = table(rows)
    for name, value in below.items():
        if is_table(value):
            lines += [f"  {name}, on every rank:", *(f"    {key:12}{cell(item)}" for key, item in value.items())]
        else:
            lines += [f"  {name}, on every rank: {cell(value)}"]
    return lines


def is_table(value: Any) -> bool:
    return isinstance(value, dict) and len(value) > 1


def table(rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def cell(value: Any) -> str:
    return "-" if value is None else str(value)


def epoch_text(epoch: dict[str, Any]) -> str:
    """One line an epoch: the loss of all ranks and of each, accuracies, speed."""
    per_rank = " ".join("-" if loss is None else f"{loss:.4f}" for loss in epoch["loss_per_rank"])
    return (
        f"epoch {epoch['epoch']:2}  train loss {epoch['loss']:.4f} (per rank {per_rank})  "
        f"train accuracy {epoch['train_accuracy']:.2%}  test accuracy {epoch['test_accuracy']:.2%}  "
        f"{epoch['samples_per_second']:,.0f} samples/s  {epoch['seconds']:.1f} s"
    )


def data_text(data: dict[str, Any]) -> str:
    return f"{data['name']} ({data['train']:,} + {data['test']:,} images; {data['why']})"


def document(lesson: str, world: World, started: float, steps: dict[str, list[Any]], **more: Any) -> str:
    """The run as one JSON document; `steps` maps each step's name to what it gave, rank by rank.

    A number that JSON has no word for (a diverged loss is NaN) becomes null.
    """
    content = {
        "lesson": lesson,
        "backend": world.backend,
        "device": world.device,
        "world_size": world.size,
        "seconds": round(time.perf_counter() - started, 3),
        "steps": [{"name": name, "ranks": ranks} for name, ranks in steps.items()],
        **more,
    }
    return json.dumps(sayable(content), allow_nan=False)


def sayable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: sayable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [sayable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
