"""When a training run takes snapshots, and what it goes on from. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.flags import check_at_least_one

AUTO, NO = "auto", "no"


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Raises `UsageError` for numbers below 1, and for no time at all between two snapshots."""

    folder: Path
    every: int = 100
    """Steps of the optimizer between two snapshots."""
    seconds: float | None = None
    """Seconds between two snapshots, which then counts, and not `every`."""
    keep: int = 3
    """How many are kept, the newest ones."""
    resume: str = AUTO
    """`AUTO`: from the newest in the folder, if there is one. `NO`: from the start, in a folder without any. Or the
    path of a snapshot. (A world that was restarted always goes on from the newest.)"""

    def __post_init__(self) -> None:
        check_at_least_one(self, "every", "keep")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"a snapshot every {self.seconds:g} s: use a finite number of seconds above 0")
