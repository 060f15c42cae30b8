"""The mean over samples, where ranks have different numbers of them."""

from __future__ import annotations

import torch

from playground.exercises.cases import UNEVEN, Case, Cases


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, samples in (UNEVEN | {"100,000 samples on rank 0": (100_000, 1, 0, 2, 3)}).items():
        everyones = [torch.arange(number) % 5 + 10.0**other for other, number in enumerate(samples[:size])]
        due = torch.cat(everyones).double().mean().item()
        yield Case(about, (everyones[rank],), returns=due, is_coded=False)
