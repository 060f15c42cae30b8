"""Judges of the exercises on mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.exercises.cases import Case, Cases, digits, predict
from playground.exercises.layouts import POWERS, choose
from playground.exercises.observation import OWN
from playground.training.mesh_costs import TrainingTask, hosts_of_eight

SHAPES = ((2, 2), (3, 2), (2, 3), (2, 1, 2), (2, 2, 2), (4, 2), (1, 2), (2,))


def axis_sums(rank: int, size: int, seed: int) -> Cases:
    """Each digit of a sum says which rank is in it. A tensor of ranks is the oracle: its rows along
    an axis."""
    for shape in (shape for shape in SHAPES if prod(shape) == size):
        mesh = torch.arange(size).view(shape)
        rows = (
            row
            for axis in range(mesh.dim())
            for row in mesh.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
        )
        sums = [sum(digits(other, 3) for other in row) for row in rows if rank in row]
        most, tensor = sum(3 * (ranks - 1) for ranks in shape), digits(rank, 3)
        yield Case(
            f"a mesh of {' x '.join(map(str, shape))}",
            (shape, tensor),
            sums,
            held={OWN: tensor},
            expected={OWN: tensor.clone()},
            names=[f"sum along axis {axis}" for axis in range(len(shape))],
            most_moved=most,
        )


def two_by_two(rank: int, size: int, seed: int) -> Cases:
    """The mean error and all gradients of an MLP. One process is the oracle."""
    pairs = [[each, each + 1] for each in range(0, size, 2)]
    tensor = [dist.new_group(pair) for pair in pairs][rank // 2]
    data = [dist.new_group(list(ranks)) for ranks in zip(*pairs, strict=True)][rank % 2]
    for samples in ((1, 1, 1), (2, 5, 3), (4, 1, 2)):
        torch.manual_seed(seed)
        parts = samples[: size // 2]
        tokens, targets = torch.randn(2, sum(parts), 3).double()
        up, down = (torch.randn(shape).double().requires_grad_() for shape in ((3, 4), (4, 3)))
        loss = F.mse_loss(torch.relu(tokens @ up) @ down, targets)
        loss.backward()
        mine = (each.split(parts)[rank // 2].clone() for each in (tokens, targets))
        columns = up.detach().chunk(2, 1)[rank % 2].clone()
        rows = down.detach().chunk(2)[rank % 2].clone()
        given = [each.requires_grad_() for each in (columns, rows)]
        due = [up.grad.chunk(2, 1)[rank % 2], down.grad.chunk(2)[rank % 2]]
        held = partial(gradients_of, given)
        about = f"samples of each replica: {', '.join(map(str, parts))}"
        # A rank's outputs, forward and backward, and in the group of data the gradients and some
        # numbers.
        most = 2 * 3 * parts[rank // 2] + 2 * max(1, len(parts) - 1) * (up.numel() + 2) + 8
        all_given = (data, tensor, *mine, *given)
        yield Case(
            about,
            all_given,
            loss.detach(),
            held=held,
            expected={"grad": due},
            is_coded=False,
            most_moved=most,
        )


def gradients_of(tensors: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor | None]]:
    return {"grad": [each.grad for each in tensors]}


AXES = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (3, 1, 2), (2, 3, 1))
TOKENS = 3
"""Number of tokens of each rank of dp and cp."""


def gradient_factor(rank: int, size: int, seed: int) -> Cases:
    """The gradient of one weight by four recipes, divided by that of one process."""
    for dp, cp, tp in (axes for axes in AXES if prod(axes) == size):
        groups = torch.arange(size).view(dp * cp, tp).T.tolist()
        group = [dist.new_group(ranks) for ranks in groups][rank % tp]
        shards = torch.arange(1.0, dp * cp * TOKENS + 1).view(dp * cp, TOKENS)
        gradient = partial(sum_gradients, shards[rank // tp])
        found = {
            "own_mean_summed": gradient(TOKENS, group),
            "all_tokens_summed": gradient(shards.numel(), group),
            "all_tokens_averaged": gradient(shards.numel(), group, dp * cp),
            "all_tokens_summed_over_world": gradient(shards.numel(), None),
            "own_mean_averaged_over_world": gradient(TOKENS, None, size),
        }
        counted = {name: float(each / shards.mean()) for name, each in found.items()}
        yield predict(f"dp {dp}, cp {cp}, tp {tp}", (dp, cp, tp), counted)


def sum_gradients(
    tokens: torch.Tensor, divisor: float, group: dist.ProcessGroup | None, ranks: float = 1.0
) -> torch.Tensor:
    """The gradient of a weight from this rank's tokens, added up over a group, and divided."""
    weight = torch.ones((), requires_grad=True)
    (weight * tokens).sum().div(divisor).backward()
    dist.all_reduce(weight.grad, group=group)
    return weight.grad / ranks


def fit_the_mesh(rank: int, size: int, seed: int) -> Cases:
    """A mesh and a stage of ZeRO, with fewer sequences than GPUs."""
    task = TrainingTask(
        layers=48, width=8192, length=4096, sequences=128,
        gpus=256, memory=40e9, flops=300e12, machine=hosts_of_eight(25e9, 300e9),
    )  # fmt: skip
    about = "38.7 billion parameters on 256 GPUs of 40 GB"
    yield choose(about, task, {"dp": POWERS, "pp": POWERS, "tp": POWERS, "zero": (1, 3)})
