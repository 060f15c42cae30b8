"""Training of the tiny GPT by any way that computes gradients, beside one process: the same batches
on every rank, and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from playground.training.replicas import max_abs_diff
from playground.training.tiny_gpt import LR, Batch, copying_loss, set_lr

EXACT_STEPS, EXACT = 5, 1e-12
"""Steps in float64, and how far losses and parameters may then be from one process's: sums are
rounded differently."""
Backward = Callable[[Tensor, Tensor], Tensor | float]
"""From the tokens and targets of a whole batch: computes the gradients, and returns the loss of the
whole batch."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The largest difference of a loss from one process's, and of a parameter."""

    loss_difference: float
    parameter_difference: float


def backward_alone(model: nn.Module) -> Backward:
    """That of one process."""

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = copying_loss(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return backward


def train(model: nn.Module, backward: Backward, batches: Sequence[Batch]) -> list[float]:
    """Take a step of AdamW for each batch. Returns the losses of the whole batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = list[float]()
    for step, batch in enumerate(batches):
        set_lr(optimizer, step)
        optimizer.zero_grad()
        losses.append(float(backward(*batch)))
        optimizer.step()
    return losses


def uncut(whole: Tensor, own: Tensor) -> Tensor:
    """The part of a parameter that every rank has whole."""
    return whole


def compare(
    ours: tuple[nn.Module, Backward],
    alone: tuple[nn.Module, Backward],
    batches: Sequence[Batch],
    part: Callable[[Tensor, Tensor], Tensor] = uncut,
) -> Differences:
    """Train `ours` and as one process; `part` cuts from one process's parameter what this rank
    should have of it."""
    found, expected = (
        torch.tensor(train(*each, batches), dtype=torch.float64) for each in (ours, alone)
    )
    return Differences(
        loss_difference=max_abs_diff(found, expected),
        parameter_difference=parameter_difference(alone[0], ours[0], part),
    )


@torch.no_grad()
def parameter_difference(
    whole: nn.Module, model: nn.Module, part: Callable[[Tensor, Tensor], Tensor] = uncut
) -> float:
    """The largest difference between this rank's parameters and the parts of one process's of the
    same names; infinite if one of them is no finite number."""
    named = dict(whole.named_parameters())
    return max(max_abs_diff(part(named[name], own), own) for name, own in model.named_parameters())
