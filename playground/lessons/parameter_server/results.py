"""What each way of training came to. Plain data: reading it does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from playground.runtime.errors import PlaygroundError
from playground.training.results import ROUNDING


@dataclass(frozen=True, kw_only=True)
class Point:
    """The training after so many samples."""

    samples: int
    seconds: float
    loss: float
    """The mean over the samples since the point before, with dropout on."""


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """One mode of the server, or all-reduce in its place."""

    mode: str
    seconds: float
    samples: int
    points: list[Point]
    staleness: dict[int, int]
    """Of how many gradients the parameters had changed so often since the worker had got them."""
    gradients_by_worker: list[int]
    """That the server took."""
    bytes_per_step: int
    """Sent and received by the busiest rank, for a gradient of every worker."""
    test_accuracy: float
    lost_workers: dict[int, int] = field(default_factory=dict)
    """Workers that died, and how many gradients in all the server had taken by then: 0 if it was before this mode."""
    difference_to_all_reduce: float = 0.0
    """The largest of any parameter, after the same number of gradients, the first few."""

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def mean_staleness(self) -> float:
        return sum(steps * count for steps, count in self.staleness.items()) / sum(self.staleness.values())


@dataclass(frozen=True, kw_only=True)
class MistakeResult:
    """What a worker of the published parameter server met."""

    worker: int
    version_read: int
    """Of the server's parameters, when its forward pass used them."""
    version_found: int
    """When its backward pass came back to them."""
    error: str
    """What backward raised; empty if it went well."""


@dataclass(frozen=True, kw_only=True)
class ServerResult:
    """What a rank brings back."""

    mistake: MistakeResult | None
    """None on the server, which only answers."""
    modes: list[ModeResult]
    """All-reduce, then each mode of the server; empty on a worker."""


def steps_verdict(modes: Sequence[ModeResult]) -> str:
    """What to say of the synchronous server's steps, or of the number of gradients, if it was not one of the modes.

    Raises `PlaygroundError` if they were others than those of all-reduce, by more than rounding.
    """
    for each in modes:
        difference = each.difference_to_all_reduce
        if each.mode == "sync" and not difference < ROUNDING:
            raise PlaygroundError(f"sync went up to {difference:.2g} away from all-reduce: rounding does less")
        if each.mode == "sync":
            return f"sync took the first steps as all-reduce did (largest difference {difference:.1e})"
    return "in every mode the server took as many gradients as all-reduce"
