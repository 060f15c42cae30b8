"""The learner writes the judge: it is given trainings that are right, and others that are not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from playground.exercises.cases import Case
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

if TYPE_CHECKING:
    import torch
    from torch import nn

LOOK = "            is_right = is_right and torch.allclose(mine, due)\n"
ASK = "    dist.all_reduce(wrong_ranks)\n"
EXERCISE = Exercise(
    worlds=(2, 3, 4),
    preload=("torch._dynamo",),  # which the optimizer imports
    mistakes=(
        Mistake("rank 0 only", {ASK: "    dist.broadcast(wrong_ranks, 0)\n"}, "the others' parameters may be wrong"),
        Mistake("first step only", {LOOK: f"{LOOK}        break\n"}, "some mistakes show later"),
        Mistake("each rank for itself", {ASK: ""}, "a rank does not know what others have found"),
        Mistake("the first parameter only", {LOOK: f"{LOOK}            break\n"}, "some mistakes show in one alone"),
        Mistake("too tolerant", {"allclose(mine, due)": "allclose(mine, due, atol=0.1)"}, "a wrong step is small, too"),
        Mistake("too strict", {"allclose(mine, due)": "equal(mine, due)"}, "rounding is no mistake"),
        Mistake(
            "returns before the others",
            {LOOK: "            if not torch.allclose(mine, due):\n                return False\n"},
            "who has found a difference leaves them waiting",
            DEADLOCK,
        ),
    ),
)
LR, STEPS = 0.1, 3


def cases(rank: int, size: int, seed: int) -> Iterator[Case]:
    import torch
    from torch import nn

    for about, is_right, mistake in (
        ("right: each rank computes whole batches", True, "alone"),
        ("right: averaged gradients", True, ""),
        ("wrong: gradients are summed", False, "summed"),
        ("wrong: a mean of the ranks' means, with unequal shares", False, "unweighted"),
        ("wrong: gradients are never set to zero", False, "accumulated"),
        ("wrong: the last rank leaves out its last step", False, "left out"),
        ("wrong: the biases stay as they are", False, "without biases"),
        ("wrong: the last step leaves out the last parameter", False, "without 2.bias"),
        ("wrong: the last step leaves out the first parameter", False, "without 0.weight"),
        ("wrong: ranks 0 and 1 move apart by what the mean does not show", False, "apart"),
        ("wrong: gradients are rounded to bfloat16", False, "rounded"),
        ("right: gradients travel as float32", True, "float32"),
    ):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        inputs, targets = (torch.randn(STEPS, 7, width).double() for width in (3, 1))
        step = partial(train, mistake, rank, size, enumerate(zip(inputs, targets, strict=True)))
        yield Case(about, (model, step, inputs, targets), returns=is_right, is_coded=False)


def train(
    mistake: str,
    rank: int,
    size: int,
    coming: Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]],
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """A step of SGD on this rank's part of a batch, with a mistake. `coming`: numbers of steps, and whole batches."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

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
        param.data += 0.01 * sign * (torch.arange(param.numel()).view_as(param) - (param.numel() - 1) / 2)
