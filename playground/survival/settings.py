"""When a training run takes snapshots, and what it resumes from. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from playground.runtime.flags import check_at_least_one

AUTO, NO = "auto", "no"


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Raises `UsageError` for a number of steps below 1."""

    folder: Path
    """Seen by all ranks, on whatever host they are."""
    every: int = 100
    """Steps of the optimizer between two snapshots."""
    resume: str = AUTO
    """`AUTO`: from the newest in the folder, if there is one. `NO`: from the start, in a folder without any. Or the
    path of a snapshot. (A world that was restarted always resumes from the newest.)"""

    def __post_init__(self) -> None:
        check_at_least_one(self, "every")
