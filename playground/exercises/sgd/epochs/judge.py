"""Shuffling without a message: every rank draws the same order, and a new one in every epoch."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import Exercise, Mistake

EXERCISE = Exercise(
    mistakes=(
        Mistake("forgets set_epoch", {"sampler.set_epoch(epoch)": "pass"}, "every epoch has the order of epoch 0"),
        Mistake(
            "a seed per rank",
            {"seed=seed": "seed=seed + rank"},
            "ranks draw different orders: some samples are visited twice, others never",
        ),
        Mistake(
            "counts from 0 after a restart",
            {"range(first, first + count)": "range(count)"},
            "the first epochs are repeated in their old order",
        ),
        Mistake("never shuffles", {"seed=seed": "shuffle=False"}),
        Mistake("every rank visits every sample", {"size, rank, seed": "1, 0, seed"}),
        Mistake(
            "drops what is left over",
            {"seed=seed": "seed=seed, drop_last=True"},
            "the order is to be filled up, not cut off",
        ),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch

    for samples, first, count in ((12, 0, 1), (12, 0, 3), (7, 2, 2), (1, 0, 2), (100, 5, 1)):
        due = []
        for epoch in range(first, first + count):
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + 3 + epoch)).tolist()
            due.append([order[place % samples] for place in range(rank, -(-samples // size) * size, size)])
        about = f"{samples} sample{'s' * (samples != 1)}, {count} epoch{'s' * (count != 1)}"
        about += f", from epoch {first} on" if first else ""
        yield Case(about, (samples, seed + 3, first, count), returns=due, is_coded=False)
