"""What the parameter server depends on. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.remote.agents import AGENTS
from playground.runtime.checks import check_at_least_one, check_choice, check_not_negative
from playground.runtime.errors import UsageError
from playground.training.settings import TrainingSettings

MODES = {
    "sync": "waits for every worker's gradient, then takes one step with their mean",
    "async": "takes a step with each gradient as it comes, however old",
    "stale-synchronous": "the same, but nobody gets more than --staleness gradients ahead of the slowest",
}
"""When the server takes a step, and when a worker gets the new parameters."""
ALL_REDUCE = "all-reduce"
"""The same training without a server, to compare with."""

MAX_SLOW = 1e6
"""The largest factor by which a worker can be slowed down."""
SERVER = 0
"""Its rank. Worker 0 is rank 1, and so on."""
EARLY_STEPS = 5
"""Steps after which the modes are compared, parameter by parameter. Later rounding grows, wherever it decides which of
two numbers a ReLU or max_pool lets through."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. Raises `UsageError` for what cannot be."""

    lr: float = 0.05
    modes: tuple[str, ...] = tuple(MODES)
    steps: int = 100
    """Global batches: so many gradients of each worker, on average."""
    staleness: int = 3
    """Stale-synchronous: how many gradients the fastest worker may be ahead of the slowest."""
    slow_worker: float = 1.0
    """How many times as long as its gradient takes the last worker needs for it."""
    over: str = "send-recv"
    """What carries the remote calls: a name of `AGENTS`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for mode in self.modes:
            check_choice("mode", mode, MODES)
        check_choice("over", self.over, AGENTS)
        check_at_least_one(self, "steps")
        check_not_negative(self, "staleness")
        if not 1 <= self.slow_worker <= MAX_SLOW:
            raise UsageError(f"slow_worker {self.slow_worker:g}: it must be a number from 1 to {MAX_SLOW:g}")

    @property
    def early_steps(self) -> int:
        return min(EARLY_STEPS, self.steps)
