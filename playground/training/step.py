"""The training step, once: forward, backward, synchronise, step.

The lessons sgd and ddp write it out, as the tutorials do. Whatever else trains here calls this one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.nn.functional as F

from playground.training.sync import GradSync

Forward = Callable[[], torch.Tensor]
"""Runs a forward pass, and returns the loss."""
OnMoment = Callable[[str], object]
"""Called with "forward", "synced" and "step" (the optimizer's) as each of them is done."""


def training_step(
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    sync: GradSync,
    *,
    last: bool = False,
    on_moment: OnMoment = lambda name: None,
) -> torch.Tensor:
    """One step of the optimizer. Returns the loss, without its graph. `last` says that what follows
    is no step."""
    loss = backward(optimizer, forward, sync, on_moment=on_moment)
    optimizer.step()
    on_moment("step")
    sync.after_step(last)
    return loss


def backward(
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    sync: GradSync,
    *,
    on_moment: OnMoment = lambda name: None,
) -> torch.Tensor:
    """All of a training step but the optimizer's part: leaves the synchronised gradients."""
    optimizer.zero_grad()
    loss = forward()
    on_moment("forward")
    loss.backward()
    sync.after_backward()
    on_moment("synced")
    return loss.detach()


def mean_loss_part(
    output: torch.Tensor, labels: torch.Tensor, samples_per_rank: float
) -> torch.Tensor:
    """This rank's part of the mean loss over a global batch: averaged over the ranks, it is the
    mean over all samples.

    `samples_per_rank` is the size of the global batch divided by the number of ranks, whatever this
    rank's part of it.
    """
    return F.nll_loss(output, labels, reduction="sum") / samples_per_rank
