"""Training of the tiny GPT on sequences to copy, by any way that computes gradients, and its
comparison with one process: the same batches on every rank, AdamW, a clock, and counters of what a
step keeps and sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
from torch import Tensor, nn

from playground.algorithms.traffic import Traffic
from playground.tap import observing
from playground.training.activations import Activations
from playground.training.one_process import Differences, Training
from playground.training.replicas import max_abs_diff
from playground.training.tiny_gpt import copying, copying_loss
from playground.world import device, report, synchronize

LR, WARM_UP = 3e-3, 20
"""AdamW's learning rate, and in how many steps it grows to that: the loss is below 0.1 by step
70."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, both [batch, length]."""
Backward = Callable[[Tensor, Tensor], Tensor | float]
"""From the tokens and targets of a whole batch: computes the gradients, and returns the loss of the
whole batch."""


def batches(samples: int, steps: int, seed: int) -> list[Batch]:
    """A batch for each step, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (copying(samples, generator) for _ in range(steps))
    return [(tokens.to(device()), targets.to(device())) for tokens, targets in drawn]


def backward_alone(model: nn.Module) -> Backward:
    """That of one process."""

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = copying_loss(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return backward


def train(way: str, model: nn.Module, backward: Backward, batches: Sequence[Batch]) -> Training:
    """Take a step of AdamW for each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = list[float]()
    seconds = list[float]()
    traffic = Traffic()
    activations = Activations(model)
    for step, batch in enumerate(batches):
        report(phase=f"{way}: training", way=way, step=step, steps=len(batches))
        with ExitStack() as counting:
            if step + 1 == len(batches):
                counting.enter_context(observing(traffic))
                counting.enter_context(activations)
            start = time.perf_counter()
            set_lr(optimizer, step)
            optimizer.zero_grad()
            losses.append(float(backward(*batch)))
            optimizer.step()
            synchronize()
            seconds.append(time.perf_counter() - start)
    return Training(
        losses=losses,
        first=losses[0],
        last=losses[-1],
        step_seconds=median(seconds[1:] or seconds),
        messages=sum(traffic.calls.values()),
        sent=traffic.sent,
        kept=activations.peak,
        calls=dict(traffic.calls),
    )


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of step `step`, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)


def uncut(whole: Tensor, own: Tensor) -> Tensor:
    """The part of a parameter that every rank has whole."""
    return whole


def compare(
    way: str,
    ours: tuple[nn.Module, Backward],
    alone: tuple[nn.Module, Backward],
    batches: Sequence[Batch],
    part: Callable[[Tensor, Tensor], Tensor] = uncut,
) -> Differences:
    """Train by a way and as one process; `part` cuts from one process's parameter what this rank
    should have of it."""
    found, expected = (
        torch.tensor(train(way, *each, batches).losses, dtype=torch.float64)
        for each in (ours, alone)
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
