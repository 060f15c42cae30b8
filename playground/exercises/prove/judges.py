"""Judges of the exercises on prove."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases
from playground.ui.units import plural

LR, STEPS = 0.1, 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a training differs from SGD on the mean of all ranks' gradients."""

    computes_alone: bool = False
    """Whether each rank computes whole batches, and sends nothing."""
    sums: bool = False
    """Whether gradients are summed, not averaged."""
    is_unweighted: bool = False
    """Whether each rank's mean counts as much, however large its share of the batch is."""
    accumulates: bool = False
    """Whether gradients are never set to zero."""
    dtype: torch.dtype = torch.float64
    """What gradients are rounded to."""
    kept: str = ""
    """The ending of the names of parameters that stay as they are."""
    kept_last: str = ""
    """The name of a parameter that stays as it is in the last step."""
    skips_last: bool = False
    """Whether the last rank leaves out its last step."""
    moves_apart: bool = False
    """Whether the last step adds numbers on rank 0 and subtracts them on rank 1, whose mean is zero
    in each parameter."""

    def leaves_out(self, name: str, is_last_step: bool, is_last_rank: bool) -> bool:
        """Whether a step leaves a parameter as it is."""
        if self.kept and name.endswith(self.kept):
            return True
        return is_last_step and (name == self.kept_last or (self.skips_last and is_last_rank))


def judge(rank: int, size: int, seed: int) -> Cases:
    """The learner writes the judge: it is given trainings that are right, and others that are
    not."""
    for about, variant in (
        ("right: each rank computes whole batches", Variant(computes_alone=True)),
        ("right: averaged gradients", Variant()),
        ("wrong: gradients are summed", Variant(sums=True)),
        ("wrong: a mean of the ranks' means, with unequal shares", Variant(is_unweighted=True)),
        ("wrong: gradients are never set to zero", Variant(accumulates=True)),
        ("wrong: the last rank leaves out its last step", Variant(skips_last=True)),
        ("wrong: the biases stay as they are", Variant(kept="bias")),
        ("wrong: the last step leaves out the last parameter", Variant(kept_last="2.bias")),
        ("wrong: the last step leaves out the first parameter", Variant(kept_last="0.weight")),
        (
            "wrong: ranks 0 and 1 move apart by what the mean does not show",
            Variant(moves_apart=True),
        ),
        ("wrong: gradients are rounded to bfloat16", Variant(dtype=torch.bfloat16)),
        ("right: gradients travel as float32", Variant(dtype=torch.float32)),
    ):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        inputs, targets = (torch.randn(STEPS, 7, width).double() for width in (3, 1))
        step = partial(train, variant, rank, size, enumerate(zip(inputs, targets, strict=True)))
        yield Case(
            about, (model, step, inputs, targets), returns=about.startswith("right"), is_coded=False
        )


def train(
    variant: Variant,
    rank: int,
    size: int,
    coming: Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]],
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """A step of SGD on this rank's part of a batch, done in this way. `coming`: numbers of steps,
    and whole batches."""
    step, whole = next(coming)
    is_last_step, is_last_rank = step == STEPS - 1, rank == size - 1
    weight = 1 if variant.is_unweighted else len(inputs) * size / len(whole[0])
    if variant.computes_alone:
        inputs, targets = whole
        weight = 1
        size = 1
    if not variant.accumulates:
        model.zero_grad()
    (F.mse_loss(model(inputs), targets) * weight).backward()
    for name, param in model.named_parameters():
        gradient = param.grad.to(variant.dtype).double()
        if not variant.computes_alone:
            dist.all_reduce(gradient)
        if not variant.sums:
            gradient /= size
        if not variant.leaves_out(name, is_last_step, is_last_rank):
            param.data.add_(gradient, alpha=-LR)
        if variant.moves_apart and is_last_step:
            sign = {0: 1, 1: -1}.get(rank, 0)
            places = torch.arange(param.numel()).view_as(param)
            param.data += 0.01 * sign * (places - (param.numel() - 1) / 2)


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
        names = [f"step {step}" for step in range(len(totals))]
        yield Case(about, (batches[rank], 0.1, 32, warm_up), due, names, is_coded=False)


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
