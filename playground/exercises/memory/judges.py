"""Judges of the exercises on memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, predict
from playground.exercises.layouts import choose
from playground.training.activations import Activations, Checkpoint
from playground.training.mesh_costs import TrainingTask, hosts_of_eight
from playground.ui.units import plural

WIDTH = 3


def master_weights(rank: int, size: int, seed: int) -> Cases:
    """Many small steps, from gradients of which one rank's is large. What master weights have moved
    by is looked at: beside it a lost step is seen."""
    steps = 20
    for about, large in (("equal gradients", 1.0), ("a large gradient on rank 0", 256.0)):
        rate, start = 0.25, 512.0
        own = [large if other == 0 else 1.0 for other in range(size)]
        master = torch.full((3,), start)
        param = master.bfloat16()
        gradient = torch.full_like(param, own[rank])
        moved = torch.full((3,), steps * rate * sum(own) / size / (1 if large == 1 else 128))
        slow = rate if large == 1 else rate / 128
        yield Case(
            f"{steps} steps, {about}",
            (),
            run=partial(step_often, rank, size, steps, param, master, gradient, slow),
            held=partial(describe_weights, param, master, start),
            expected={"master moved": moved, "parameter": (start - moved).bfloat16()},
            is_coded=False,
        )


def step_often(
    rank: int, size: int, steps: int,
    param: torch.Tensor, master: torch.Tensor, gradient: torch.Tensor, rate: float,
    function: Callable[..., None],
) -> None:  # fmt: skip
    for _ in range(steps):
        function(rank, size, param, master, gradient.clone(), rate)


def describe_weights(
    param: torch.Tensor, master: torch.Tensor, start: float
) -> dict[str, torch.Tensor]:
    return {"master moved": start - master, "parameter": param}


def recompute(rank: int, size: int, seed: int) -> Cases:
    """Gradients, what is kept for backward, and the next random number. The layers as they are, are
    the oracle."""
    for samples in (4, 9):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())
        run = partial(run_layers, layers, torch.randn(samples, WIDTH))
        due = run(lambda layers, inputs: layers(inputs))
        yield Case(
            plural(samples, "sample"),
            (),
            {**due, "kept": "the inputs"},
            is_coded=False,
            run=run,
            gives_rank=False,
        )


def run_layers(
    layers: nn.Module, inputs: torch.Tensor, function: Callable[..., torch.Tensor]
) -> dict[str, object]:
    """Forward, by the function, and backward; what autograd kept between them is counted."""
    layers.zero_grad()
    torch.manual_seed(7)
    own, kept = inputs.clone().requires_grad_(), [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = function(layers, own)
    torch.rand(())  # another layer's, say
    outputs.backward(torch.arange(1.0, outputs.numel() + 1).view_as(outputs))
    return {
        "outputs": outputs.detach().clone(),
        "gradient of the inputs": own.grad,
        "gradients of the layers": [param.grad for param in layers.parameters()],
        "kept": "the inputs" if kept[0] <= inputs.numel() else f"{kept[0]} numbers",
        "next random number": torch.rand(()),
    }


def checkpoint_peak(rank: int, size: int, seed: int) -> Cases:
    """The bytes that autograd keeps of a stack of blocks, with checkpoints and without."""
    for samples, width, blocks, every in ((4, 8, 6, 2), (3, 16, 6, 1), (2, 4, 16, 4), (5, 4, 3, 3)):
        layers = [nn.Linear(width, width, bias=False) for _ in range(blocks)]
        stack = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        groups = [stack[first : first + every] for first in range(0, blocks, every)]
        counted = {}
        for way in ("all", "checkpointed"):
            hidden = torch.ones(samples, width, requires_grad=True)
            with Activations(stack) as activations:
                for group in groups:
                    is_kept = way == "all"
                    hidden = group(hidden) if is_kept else Checkpoint.apply(group, hidden)
                counted[way] = activations.held
                hidden.sum().backward()
        counted["peak"] = activations.peak
        about = f"{plural(blocks, 'block')}, every {every}"
        yield predict(about, (samples, width, blocks, every), counted)


def lost_gradients(rank: int, size: int, seed: int) -> Cases:
    """Microbatches of which one rank's first has a large gradient. Whole numbers, so that sums in
    float32 are exact."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, large = draw.randrange(size), 256.0 * draw.randrange(1, 4)
        small = [float(draw.randrange(1, 3)) for _ in range(7)]
        first = [large if other == culprit else 1.0 for other in range(size)]
        sums = [one + sum(small) for one in first]
        batches = [torch.tensor([value]) for value in (first[rank], *small)]
        yield Case(
            plural(len(batches), "microbatch", "es"),
            (batches, torch.Tensor.bfloat16),
            (sums[rank], sum(sums) / size),
            names=("its own sum", "the mean"),
            is_coded=False,
            culprit=culprit,
        )


def fit_with_recompute(rank: int, size: int, seed: int) -> Cases:
    """What is kept against what is sent, on a slow network."""
    task = TrainingTask(
        layers=32, width=4096, length=4096, sequences=128,
        gpus=32, memory=40e9, flops=300e12, machine=hosts_of_eight(1e9, 200e9),
    )  # fmt: skip
    about = "6.4 billion parameters on 32 GPUs of 40 GB"
    yield choose(about, task, {"zero": (1, 2, 3), "microbatch": (1, 2, 4), "recompute": (0, 1)})
