"""What the failures cost. Plain data: reading it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


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
