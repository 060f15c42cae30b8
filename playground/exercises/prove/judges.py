"""Judges of the exercises on prove."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases

LR, STEPS = 0.1, 3


def judge(rank: int, size: int, seed: int) -> Cases:
    """The learner writes the judge: it is given trainings that are right, and others that are
    not."""
    for about, mistake in (
        ("right: each rank computes whole batches", "alone"),
        ("right: averaged gradients", ""),
        ("wrong: gradients are summed", "summed"),
        ("wrong: a mean of the ranks' means, with unequal shares", "unweighted"),
        ("wrong: gradients are never set to zero", "accumulated"),
        ("wrong: the last rank leaves out its last step", "left out"),
        ("wrong: the biases stay as they are", "without biases"),
        ("wrong: the last step leaves out the last parameter", "without 2.bias"),
        ("wrong: the last step leaves out the first parameter", "without 0.weight"),
        ("wrong: ranks 0 and 1 move apart by what the mean does not show", "apart"),
        ("wrong: gradients are rounded to bfloat16", "rounded"),
        ("right: gradients travel as float32", "float32"),
    ):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        inputs, targets = (torch.randn(STEPS, 7, width).double() for width in (3, 1))
        step = partial(train, mistake, rank, size, enumerate(zip(inputs, targets, strict=True)))
        yield Case(
            about, (model, step, inputs, targets), returns=about.startswith("right"), is_coded=False
        )


def train(
    mistake: str,
    rank: int,
    size: int,
    coming: Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]],
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """A step of SGD on this rank's part of a batch, with a mistake. `coming`: numbers of steps, and
    whole batches."""
    step, whole = next(coming)
    weight = 1 if mistake == "unweighted" else len(inputs) * size / len(whole[0])
    if mistake == "alone":
        (inputs, targets), weight, size = whole, 1, 1
    if mistake != "accumulated":
        model.zero_grad()
    (F.mse_loss(model(inputs), targets) * weight).backward()
    for name, param in model.named_parameters():
        dtype = {"rounded": torch.bfloat16, "float32": torch.float32}.get(mistake, torch.float64)
        gradient = param.grad.to(dtype).double()
        if mistake != "alone":
            dist.all_reduce(gradient)
        if mistake != "summed":
            gradient /= size
        stays = mistake == "without biases" and name.endswith("bias")
        left_out = mistake == f"without {name}" or (mistake == "left out" and rank == size - 1)
        if not stays and not (left_out and step == STEPS - 1):
            param.data.add_(gradient, alpha=-LR)
        sign = {0: 1, 1: -1}.get(rank, 0) * (mistake == "apart" and step == STEPS - 1)
        param.data += (
            0.01 * sign * (torch.arange(param.numel()).view_as(param) - (param.numel() - 1) / 2)
        )
