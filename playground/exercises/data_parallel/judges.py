"""Judges of the exercises on data_parallel."""

from __future__ import annotations

import time

import torch
from torch import nn

from playground.exercises.cases import UNEVEN, Case, Cases
from playground.exercises.exercise import count

FEATURES, OUTPUTS = 3, 2
TURN = 0.05
"""Seconds between two ranks' outputs: they come in the same order in every run."""


def scatter_gather(rank: int, size: int, seed: int) -> Cases:
    """DataParallel's way with a batch, between processes: cut it, compute, and put the outputs
    together."""
    for place, samples in enumerate((6, 7, 1, 60, 0)):
        module = nn.Linear(FEATURES, OUTPUTS)
        for param in module.parameters():
            nn.init.constant_(param, 10**rank)
        delay = TURN * (size + 4 if place == 0 and rank == 1 else rank)
        module.register_forward_hook(lambda *_, delay=delay: time.sleep(delay))
        batch = (torch.arange(samples).view(-1, 1) % 3 + torch.tensor([1.0, 0, 0])).contiguous()
        owners, sums = torch.arange(samples).tensor_split(size), batch.sum(1, keepdim=True) + 1
        total = torch.cat([sums[own] * 10**r for r, own in enumerate(owners)]).expand(-1, OUTPUTS)
        to_others = {other: FEATURES * len(own) for other, own in enumerate(owners) if other}
        about = f"{count(samples, 'sample')}{', rank 1 is slow' * (place == 0)}"
        given = (module, None if rank else batch, samples)
        most = {0: float("inf")} if rank else to_others
        yield Case(about, given, returns=None if rank else total, most=most)


def mean(rank: int, size: int, seed: int) -> Cases:
    """The mean over samples, where ranks have different numbers of them."""
    for about, samples in (UNEVEN | {"100,000 samples on rank 0": (100_000, 1, 0, 2, 3)}).items():
        everyones = [
            torch.arange(number) % 5 + 10.0**other for other, number in enumerate(samples[:size])
        ]
        due = torch.cat(everyones).double().mean().item()
        yield Case(
            about, (everyones[rank],), returns=due, is_coded=False, most_moved=100 * (size - 1)
        )
