"""The mean over tokens, of which ranks have unequally many. One process in float64 is the oracle."""

from __future__ import annotations

import copy

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import Exercise, Mistake

TOKENS = "tokens = (labels != PADDING).sum()"
EXERCISE = Exercise(
    builds_on=("average",),
    mistakes=(
        Mistake(
            "averaged per rank",
            {'        reduction="sum",\n': "", "loss * size / tokens": "loss"},
            "a token of a rank with few of them weighs more",
        ),
        Mistake("padding counted", {TOKENS: "tokens = torch.tensor(labels.numel())"}, "padding is no token"),
        Mistake("divides twice", {" * size": ""}, "average divides by the number of ranks, too"),
        Mistake(
            "counts its own tokens only",
            {"    dist.all_reduce(tokens)\n": ""},
            "the mean is over the tokens of all ranks",
        ),
        Mistake("forgets to average", {"    average(rank, size, model)\n": ""}, "each rank keeps its own gradients"),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    import torch.nn.functional as F
    from torch import nn

    length, padding = 7, -100
    for about, shortest in (("sentences of different lengths", 1), ("a rank without tokens", 0)):
        torch.manual_seed(seed)
        whole = nn.Linear(3, 4).double()
        model, inputs = copy.deepcopy(whole), torch.randn(size, 2, length, 3).double()
        labels = torch.randint(4, (size, 2, length))
        for other in range(size):  # 0 or 1 token a sentence on rank 0, then 3, 5, 7
            labels[other, :, min(length, shortest + 2 * other) :] = padding
        if size == 1:
            labels[0, 0] = 0
        F.cross_entropy(whole(inputs).flatten(0, 2), labels.flatten()).backward()
        yield Case(
            about,
            (model, inputs[rank], labels[rank]),
            held=lambda model=model: [param.grad for param in model.parameters()],
            expected=[param.grad for param in whole.parameters()],
            is_coded=False,
        )
