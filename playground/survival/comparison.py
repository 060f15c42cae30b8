"""Two runs that are to have ended with the same bits. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from playground.runtime.errors import PlaygroundError
from playground.survival.folder import SnapshotFile, examine, find_steps


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The last snapshots of two runs, byte by byte."""

    tensors: int
    nbytes: int
    differing: int
    """How many of these bytes differ."""

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors of {self.nbytes:,} bytes compared: parameters, optimizer state, totals and every "
            f"rank's random numbers; {self.differing:,} bytes differ."
        )

    def check(self) -> None:
        """Raise `PlaygroundError` if the two runs did not end with the same bits."""
        if self.differing:
            raise PlaygroundError(
                f"the training that was killed ended elsewhere: {self.differing:,} of {self.nbytes:,} bytes differ "
                f"from those of the undisturbed one"
            )

    def check_repeatable(self, suspects: str) -> None:
        """Raise `PlaygroundError` if two undisturbed runs did not end with the same bits: the effect of a kill
        could not be told from that. `suspects` are what on this device may do it."""
        if self.differing:
            raise PlaygroundError(
                f"two undisturbed trainings already end with different bits: {self.differing:,} of "
                f"{self.nbytes:,} bytes differ, so what a kill changes cannot be seen here; {suspects}"
            )


def last_snapshot(folder: Path) -> SnapshotFile:
    """The snapshot of a run's end, every file of it read. Raises `PlaygroundError` if it is not whole."""
    steps = find_steps(folder)
    if not steps:
        raise PlaygroundError(f"{folder} holds no snapshot: the training took none")
    found = examine(folder, steps[0], read_contents=True)
    if found.snapshot is None:
        raise PlaygroundError(f"the last snapshot in {folder}, of step {found.step}, is {found}")
    return found.snapshot
