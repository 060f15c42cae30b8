"""Judges of the exercises on GPUs, which run on simulated ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, predict
from playground.ui.units import plural

LOCAL = "LOCAL_RANK"
FLOAT = 4
"""Bytes."""


def own_gpu(rank: int, size: int, seed: int) -> Cases:
    """Hosts with two GPUs, and ranks that fill a host or take turns. The current GPU is the first
    one before."""
    for about, local in (("ranks 0 and 1 on one host", rank % 2), ("hosts in turn", rank // 2)):

        def run(function: Callable[..., torch.Tensor], local: int = local) -> dict[str, object]:
            torch.cuda.set_device(0)
            before = os.environ.get(LOCAL)
            os.environ[LOCAL] = str(local)
            try:
                tensor = function(rank, size)
                return {
                    "current GPU": torch.cuda.current_device(),
                    "device of the tensor": str(tensor.device),
                    "tensor": int(tensor),
                }
            finally:
                os.environ.pop(LOCAL)
                os.environ.update({LOCAL: before} if before else {})
                torch.cuda.set_device(0)

        yield Case(
            about,
            (),
            {"current GPU": local, "device of the tensor": f"cuda:{local}", "tensor": rank},
            run=run,
            is_coded=False,
            gives_rank=False,
        )


def wrong_device(rank: int, size: int, seed: int) -> Cases:
    """One rank is on the second GPU, and a batch of another rank is on the CPU."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        elsewhere, unlucky = draw.sample(range(size), 2)
        gpus = [int(other == elsewhere) for other in range(size)]
        numbers = [[draw.randrange(1, 9) for _ in range(draw.randrange(2, 5))] for _ in range(size)]
        expected = sum(place * number for own in numbers for place, number in enumerate(own, 1))
        places = [torch.device("cuda", gpus[rank])] * len(numbers[rank])
        if rank == unlucky:
            places[1] = torch.device("cpu")
        batches = [
            torch.full((1,), float(number), device=place)
            for number, place in zip(numbers[rank], places, strict=True)
        ]
        yield Case(
            f"GPUs of the ranks: {', '.join(map(str, gpus))}",
            (gpus, batches),
            float(expected),
            is_coded=False,
            culprit=(elsewhere, unlucky)[seed % 2],
        )


def does_it_fit(rank: int, size: int, seed: int) -> Cases:
    """The memory is between what a number of samples needs and what twice as many need."""
    for layers, width, samples in ((4, 256, 1024), (8, 128, 512), (2, 512, 1024)):
        state = 4 * FLOAT * layers * width**2
        memory = state + FLOAT * width * (layers + 1) * samples * 17 // 10
        largest = 1
        while train(layers, width, 2 * largest)[1] <= memory:
            largest *= 2
        counted = {"state": train(layers, width, 1)[0], "samples": largest}
        about = f"{plural(layers, 'layer')} of width {width}, {memory:,} bytes"
        yield predict(about, (layers, width, memory), counted)


def train(layers: int, width: int, samples: int) -> tuple[int, int]:
    """The bytes of the state of a training, and the most that a step has held."""
    before = torch.cuda.memory_allocated()
    pairs = ((nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers))
    model = nn.Sequential(*(layer for pair in pairs for layer in pair)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    inputs = torch.ones(samples, width, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=False)
        model(inputs).sum().backward()
        optimizer.step()
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    held = [each for param in model.parameters() for each in (param, param.grad)]
    return (
        sum(each.nbytes for each in (*held, *moments)),
        torch.cuda.max_memory_allocated() - before,
    )
