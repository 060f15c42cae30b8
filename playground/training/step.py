"""The training step, once: forward, backward, synchronise, step.

The lessons sgd and ddp write it out, as the tutorials do. Whatever else trains here calls this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.nn.functional as F

from playground.training.sync import GradSync

Losses = Sequence[Callable[[], torch.Tensor]]
"""Each runs a forward pass."""
Moment = Callable[[str], object]
"""Hears "forward", "synced" and "step" (the optimizer's) as each of them is done."""


def training_step(
    optimizer: torch.optim.Optimizer,
    losses: Losses,
    sync: GradSync,
    *,
    last: bool = False,
    moment: Moment = lambda name: None,
) -> torch.Tensor:
    """One step of the optimizer, for the sum of the losses. Returns that sum, without its graph.

    Of several losses, as in gradient accumulation, only the last one's backward synchronises.
    `last` says that what follows is no step.
    """
    total = backward(optimizer, losses, sync, moment=moment)
    optimizer.step()
    moment("step")
    sync.after_step(last)
    return total


def backward(
    optimizer: torch.optim.Optimizer,
    losses: Losses,
    sync: GradSync,
    *,
    moment: Moment = lambda name: None,
) -> torch.Tensor:
    """All of a training step but the optimizer's part: leaves the synchronised gradients."""
    optimizer.zero_grad()
    total = None
    for forward in losses[:-1]:
        with sync.no_sync():
            loss = forward()
            loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    loss = losses[-1]()
    moment("forward")
    loss.backward()
    sync.after_backward()
    moment("synced")
    return loss.detach() if total is None else total + loss.detach()


def mean_loss_part(
    output: torch.Tensor, labels: torch.Tensor, samples_per_rank: float
) -> torch.Tensor:
    """This rank's part of the mean loss over a global batch: averaged over the ranks, it is the
    mean over all samples.

    `samples_per_rank` is the size of the global batch divided by the number of ranks, whatever this
    rank's part of it.
    """
    return F.nll_loss(output, labels, reduction="sum") / samples_per_rank
