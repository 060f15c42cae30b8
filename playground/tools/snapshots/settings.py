"""What `snapshots measure` is asked for. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from playground.runtime.checks import check_at_least_one


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Raises `UsageError` for what cannot be measured."""

    folder: Path
    nbytes: int = 2**20
    """Of what all ranks share; each rank adds the state of its random number generator."""
    saves: int = 5
    keep: int = 3

    def __post_init__(self) -> None:
        check_at_least_one(self, "nbytes", "saves", "keep")

    @property
    def fingerprint(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name == "nbytes"}
