"""When a training run takes snapshots, and what it goes on from. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from playground.runtime.checks import check_at_least_one

AUTO, NO = "auto", "no"


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Raises `UsageError` for numbers below 1."""

    folder: Path
    every: int = 100
    """Steps of the optimizer between two snapshots."""
    keep: int = 3
    """How many are kept, the newest ones."""
    resume: str = AUTO
    """`AUTO`: from the newest in the folder, if there is one. `NO`: from the start, in a folder without any. Or the
    path of a snapshot. (A world that was restarted always goes on from the newest.)"""

    def __post_init__(self) -> None:
        check_at_least_one(self, "every", "keep")
