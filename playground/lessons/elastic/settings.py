"""Which ranks are killed, and when. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from playground.runtime.errors import UsageError

WAYS = ("sgd", "ddp")
"""How gradients are averaged: as in the lesson of that name."""


@dataclass(frozen=True)
class Kill:
    """A rank that is killed when so many steps of the training are done, before anybody takes the next."""

    rank: int
    step: int


def draw_kills(count: int, size: int, steps: int, seed: int) -> tuple[Kill, ...]:
    """`count` kills of any rank at any step, in the order of the steps, no two after the same one.

    Raises `UsageError` if there are fewer steps than that.
    """
    if count >= steps:
        raise UsageError(f"--kills {count} in a training of {steps} steps: choose fewer, or more samples or epochs")
    random = Random(seed)
    return tuple(Kill(random.randrange(size), step) for step in sorted(random.sample(range(1, steps), count)))
