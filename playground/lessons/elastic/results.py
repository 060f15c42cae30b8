"""What the failures cost, and whether they left a trace. Plain data: reading it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.errors import PlaygroundError


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One failure, and how the training went on."""

    failure: str
    """Who failed, and of what."""
    killed_after: int
    """Steps that were done then."""
    resumed_after: int
    """Steps that the newest whole snapshot had; 0 if there was none yet."""
    seconds: float
    """From the kill until the next step was completed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The last snapshots of two runs, byte by byte."""

    tensors: int
    nbytes: int
    differing: int
    """How many of these bytes differ."""

    def check(self) -> None:
        """Raise `PlaygroundError` if the two runs did not end with the same bits."""
        if self.differing:
            raise PlaygroundError(
                f"the training that was killed ended elsewhere: {self.differing:,} of {self.nbytes:,} bytes differ "
                f"from those of the one that nobody disturbed"
            )
