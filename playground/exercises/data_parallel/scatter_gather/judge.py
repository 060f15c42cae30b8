"""What DataParallel does with a batch, between processes: cut it, compute, and put the outputs together."""

from __future__ import annotations

import time

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import Exercise, Mistake

FEATURES, OUTPUTS = 3, 2
SIZES = (6, 7, 1, 60, 0)
"""Sizes of the batches. With the first one, rank 1 takes its time."""
CHUNKS = "chunks = batch.tensor_split(size)"
EXERCISE = Exercise(
    worlds=(3, 2, 1, 5, 4),
    forbidden=("scatter", "scatter_object_list", "gather", "gather_object"),
    mistakes=(
        Mistake(
            "equal chunks",
            {
                "length = len(torch.arange(samples).tensor_split(size)[rank])": "length = samples // size",
                CHUNKS: "each = samples // size\n    chunks = [batch[r * each :][:each] for r in range(size)]",
            },
            "samples // N for each leaves some out",
        ),
        Mistake(
            "the order is lost",
            {CHUNKS: "chunks = [batch[other::size].contiguous() for other in range(size)]"},
            "each rank gets samples that lie apart, and their outputs are put side by side",
        ),
        Mistake(
            "in order of arrival",
            {"dist.recv(outputs[other], src=other)": "dist.recv(outputs[other])"},
            "whoever is first is taken for rank 1",
        ),
        Mistake(
            "rank 0 computes it all",
            {"return torch.cat(outputs)": "return module(batch)"},
            "the outputs that the others sent are not used",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    from torch import nn

    for place, samples in enumerate(SIZES):
        module = nn.Linear(FEATURES, OUTPUTS)
        for param in module.parameters():
            nn.init.constant_(param, 10**rank)
        if place == 0 and rank == 1:
            module.register_forward_hook(lambda *_: time.sleep(0.2))
        batch = (torch.arange(samples).view(-1, 1) % 3 + torch.tensor([1.0, 0, 0])).contiguous()
        owners, sums = torch.arange(samples).tensor_split(size), batch.sum(1, keepdim=True) + 1
        total = torch.cat([sums[own] * 10**r for r, own in enumerate(owners)]).expand(-1, OUTPUTS)
        to_others = {other: FEATURES * len(own) for other, own in enumerate(owners) if other}
        about = f"{samples} sample{'s' * (samples != 1)}{', rank 1 is slow' * (place == 0)}"
        given, most = (module, None if rank else batch, samples), {0: float("inf")} if rank else to_others
        yield Case(about, given, returns=None if rank else total, most=most)
