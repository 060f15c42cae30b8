"""What `scale` is asked for: ranks to measure with, or a cluster. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playground.algorithms.cost_model import Machine
from playground.base.errors import UsageError
from playground.base.flags import flag

MIN_RANKS, DEFAULT_RANKS, MAX_RANKS = 4, 8, 16
"""Ranks to measure with. More would need much memory: all-to-all has N² tensors under way."""
MAX_SECONDS = 1e6
"""Largest time for a message, or a byte: beyond any machine, and far from where sums of them
overflow."""
ABOVE_ZERO: Any = {"above": 0, "most": MAX_SECONDS, "metavar": "SECONDS"}


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Raises `UsageError` for half a description of a cluster."""

    size: int | None = flag(
        None,
        "Number of ranks to measure with.",
        least=MIN_RANKS,
        most=MAX_RANKS,
        name="-n --world-size",
        shown_default=str(DEFAULT_RANKS),
    )
    alpha: float | None = flag(
        None, "Latency of a message. With --alpha and --beta nothing is measured.", **ABOVE_ZERO
    )
    beta: float | None = flag(
        None, "Inverse bandwidth: seconds per byte; 1e-10 is 10 GB/s.", **ABOVE_ZERO
    )
    gamma: float | None = flag(
        None,
        "Time to add or copy one byte.",
        least=0,
        shown_default="0",
        most=MAX_SECONDS,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        if (self.alpha is None) != (self.beta is None):
            raise UsageError(
                "--alpha and --beta belong together: give both, or neither to have them measured"
            )
        if self.alpha is None or self.beta is None:
            if self.gamma is not None:
                raise UsageError("--gamma describes a cluster: add --alpha and --beta")
        elif self.size is not None:
            raise UsageError(
                f"-n {self.size} with --alpha and --beta: nothing is measured then, leave -n out"
            )

    @property
    def machine(self) -> Machine | None:
        """The cluster that is described; None if this host is measured instead."""
        if self.alpha is None or self.beta is None:
            return None
        return Machine(self.alpha, self.beta, self.gamma or 0)
