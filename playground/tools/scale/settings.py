"""What `scale` is asked for: to measure, or to predict for a cluster that is described. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.algorithms.cost_model import Machine
from playground.runtime.errors import UsageError

MIN_RANKS, DEFAULT_RANKS, MAX_RANKS = 4, 8, 16
"""Ranks to measure with. More would need much memory: all-to-all has N² tensors under way."""


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Raises `UsageError` for half a description of a cluster."""

    size: int | None = None
    """Ranks to measure with."""
    alpha: float | None = None
    """Latency: seconds per message, between nodes if there are two levels."""
    beta: float | None = None
    """Inverse bandwidth: seconds per byte."""
    gamma: float | None = None
    """Seconds per byte added."""
    ranks_per_node: int | None = None
    inner_alpha: float | None = None
    """Seconds per message inside a node."""
    inner_beta: float | None = None
    """Seconds per byte inside a node."""

    def __post_init__(self) -> None:
        inner = (self.ranks_per_node, self.inner_alpha, self.inner_beta)
        if (self.alpha is None) != (self.beta is None):
            raise UsageError("--alpha and --beta belong together: give both, or neither to have them measured")
        if self.alpha is None or self.beta is None:
            if self.gamma is not None or any(each is not None for each in inner):
                raise UsageError("--gamma, --ranks-per-node and --inner-… describe a cluster: add --alpha and --beta")
            return
        if self.size is not None:
            raise UsageError(f"-n {self.size} with --alpha and --beta: nothing is measured then, leave -n out")
        if any(each is not None for each in inner) and any(each is None for each in inner):
            raise UsageError("--ranks-per-node, --inner-alpha and --inner-beta belong together: give all three")
        if (self.inner_alpha or 0) > self.alpha or (self.inner_beta or 0) > self.beta:
            raise UsageError(
                "a message inside a node slower than one between nodes: --inner-alpha and --inner-beta must not be "
                "higher than --alpha and --beta"
            )

    @property
    def machine(self) -> Machine | None:
        """The cluster that is described; None if there is none, and this host is to be measured."""
        if self.alpha is None or self.beta is None:
            return None
        return Machine(
            self.alpha, self.beta, self.gamma or 0, None, self.ranks_per_node or 1, self.inner_alpha or 0,
            self.inner_beta or 0,
        )  # fmt: skip
