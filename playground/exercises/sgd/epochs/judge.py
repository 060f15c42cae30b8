"""Shuffling without a message: every rank draws the same order, and a new one in every epoch."""

from __future__ import annotations

import torch

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import count


def cases(rank: int, size: int, seed: int) -> Cases:
    for samples, first, epochs in ((12, 0, 1), (12, 0, 3), (7, 2, 2), (1, 0, 2), (100, 5, 1)):
        due = []
        for epoch in range(first, first + epochs):
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + 3 + epoch)).tolist()
            due.append([order[place % samples] for place in range(rank, -(-samples // size) * size, size)])
        about = f"{count(samples, 'sample')}, {count(epochs, 'epoch')}{f', from epoch {first} on' if first else ''}"
        yield Case(about, (samples, seed + 3, first, epochs), returns=due, is_coded=False)
