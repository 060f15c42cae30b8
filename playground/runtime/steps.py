"""Steps of a lesson, run one after the other on every rank of a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from playground.runtime.backends import refusal
from playground.runtime.remote import Remote


def run_steps(rank: int, size: int, steps: Sequence[Remote], seed: int = 1234, more: tuple[Any, ...] = ()) -> list[Any]:
    """What this rank gets from each step; {"refused": words} for what the backend cannot do.

    Each step is called as `step(rank, size, *more)`.
    """
    torch.manual_seed(seed)
    outcomes: list[Any] = []
    for step in steps:
        try:
            outcomes.append(step(rank, size, *more))
        except (RuntimeError, ValueError) as error:
            if not refusal(error):
                raise
            outcomes.append({"refused": refusal(error)})
    return outcomes
