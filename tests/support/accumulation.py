"""Gradients of several forward passes, added up before they are synchronised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from playground.training.step import Forward
from playground.training.sync import GradSync


def accumulate(
    optimizer: torch.optim.Optimizer, forwards: Sequence[Forward], sync: GradSync
) -> None:
    """All of a training step but the optimizer's part: of several, only the last backward
    synchronises."""
    optimizer.zero_grad()
    for forward in forwards[:-1]:
        with sync.no_sync():
            forward().backward()
    forwards[-1]().backward()
    sync.after_backward()


def step_for_all(
    optimizer: torch.optim.Optimizer,
    forwards: Sequence[Forward],
    sync: GradSync,
    last: bool = False,
) -> None:
    """One step of the optimizer, for the sum of the losses."""
    accumulate(optimizer, forwards, sync)
    optimizer.step()
    sync.after_step(last)
