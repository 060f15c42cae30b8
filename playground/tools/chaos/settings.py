"""What `chaos` is asked for, and which kill comes when. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from playground.runtime.checks import check_at_least_one

RANK, FORK_SERVER, LAUNCHER = "rank", "fork server", "launcher"
WHOM = {"rank": (RANK,), "launcher": (LAUNCHER,), "any": (RANK, RANK, FORK_SERVER, LAUNCHER)}
"""Who may be killed, by the names of --whom; what stands there twice is drawn twice as often."""


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """Raises `UsageError` for numbers below 1."""

    words: tuple[str, ...]
    """The command that trains, and its options."""
    kills: int = 5
    seed: int = 1234
    whom: str = RANK

    def __post_init__(self) -> None:
        check_at_least_one(self, "kills")


class Draws:
    """Who is killed, and when: a seed's own."""

    def __init__(self, seed: int, whom: str) -> None:
        self.random, self.roles = Random(seed), WHOM[whom]

    def role(self) -> str:
        return self.random.choice(self.roles)

    def process(self, pids: Sequence[int]) -> int:
        return self.random.choice(pids)

    def delay(self, starting: float, training: float) -> float:
        """Seconds before a kill, once there is a process of that role after the kill before.

        `starting`: how long such a process takes until its first snapshot is written. `training`: this kill's share of
        the training that is left. A random number from 0 to 1 is squared, so that kills come in quick succession, too;
        a third is the mean of such squares.
        """
        return self.random.random() ** 2 * (starting + 3 * training)
