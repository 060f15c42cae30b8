"""Judges of the exercises on prove."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases
from playground.ui.units import plural

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
        inputs, targets = whole
        weight = 1
        size = 1
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


def scaled_rate(rank: int, size: int, seed: int) -> Cases:
    """Batches that differ from rank to rank and from step to step, the last one empty on odd
    ranks."""
    for about, warm_up in (("hardly any warm-up", 1), ("warm-up over 3 steps", 24 * size)):
        batches = [[8 - other % 2, 8, 8, 16, 0 if other % 2 else 4] for other in range(size)]
        totals = [sum(step) for step in zip(*batches, strict=True)]
        seen = [sum(totals[: step + 1]) for step in range(len(totals))]
        due = [
            0.1 * batch / 32 * min(1, done / warm_up)
            for batch, done in zip(totals, seen, strict=True)
        ]
        yield Case(about, (batches[rank], 0.1, 32, warm_up), due, is_coded=False)


def noise_scale(rank: int, size: int, seed: int) -> Cases:
    """Gradients of microbatches, which differ by noise. The estimate is made from all of them in
    one place."""
    parameters = 50
    for microbatches, batch in ((3, 8), (2, 4)):
        torch.manual_seed(seed)
        shape = size, microbatches, parameters
        gradients = (1 + 2 * torch.randn(shape) / batch**0.5).double()
        every = gradients.flatten(0, 1)
        small, large = every.square().sum(1).mean(), every.mean(0).square().sum()
        difference = (small - large) / (1 / batch - 1 / (batch * len(every)))
        due = (difference / (small - difference / batch)).item()
        yield Case(
            f"{plural(microbatches, 'microbatch', 'es')} of {batch} samples each",
            (gradients[rank].clone(), batch),
            due,
            is_coded=False,
            most_moved=2 * (parameters + size),
        )


def short_batch(rank: int, size: int, seed: int) -> Cases:
    """12 samples each, in three micro-batches, or in two on one rank. The rank at fault has fewer:
    its last micro-batch is short."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, other = draw.sample(range(size), 2)
        lengths = [[4, 4, 4] for _ in range(size)]
        lengths[culprit][-1] = draw.randrange(1, 3)
        lengths[other] = [6, 6]
        everyones = [
            [
                torch.tensor([draw.randrange(1, 99) for _ in range(length)], dtype=torch.float64)
                for length in own
            ]
            for own in lengths
        ]
        notes = [
            f"given to rank {place}: micro-batches of {', '.join(map(str, own))} samples"
            for place, own in enumerate(lengths)
        ]
        samples = torch.cat([torch.cat(own) for own in everyones])
        yield Case(
            "1 step",
            (everyones[rank],),
            samples.mean().item(),
            is_coded=False,
            culprit=culprit,
            notes=notes,
        )
