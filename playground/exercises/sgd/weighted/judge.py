"""The gradient of the whole batch, held against one process that has all samples."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

SAMPLES = {
    "3 samples each": (3,) * 5,
    "1 sample on rank 0, 3 on rank 1, …": (1, 3, 2, 5, 4),
    "none on rank 1": (2, 0, 3, 1, 2),
    "none on rank 0": (0, 4, 0, 3, 1),
}
SUM = ', reduction="sum"'
MEAN = " / targets.shape[1]"
EXERCISE = Exercise(
    builds_on=("average",),
    mistakes=(
        Mistake(
            "mean of means",
            {SUM: "", MEAN: "", "loss * size / samples": "loss"},
            "a sample weighs more on a rank that has few",
        ),
        Mistake(
            "divides by the number of ranks twice",
            {"loss * size / samples": "loss / samples"},
            "average does it already",
        ),
        Mistake("the mean over samples only", {MEAN: ""}, "mse_loss also divides by the number of outputs"),
        Mistake(
            "a rank without samples stays away",
            {"    samples =": "    if not len(inputs):\n        return\n    samples ="},
            "the others wait for it in all_reduce",
            DEADLOCK,
        ),
        Mistake(
            "leaves out the average",
            {"    average(rank, size, model)\n": ""},
            "each rank has its own samples' part of the gradient",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss

    features, outputs = 3, 2
    for about, samples in SAMPLES.items():
        if not any(samples[:size]):
            continue
        generator = torch.Generator().manual_seed(seed)
        everyones = [
            tuple(torch.randint(-3, 4, (number, width), generator=generator).float() for width in (features, outputs))
            for number in samples[:size]
        ]
        model, alone = (nn.Linear(features, outputs) for _ in range(2))
        weight = torch.randint(-3, 4, (outputs, features), generator=generator).float()
        for each in (model, alone):
            each.weight.data.copy_(weight)
            each.bias.data.fill_(1)
        all_inputs, all_targets = (torch.cat(tensors).double() for tensors in zip(*everyones, strict=True))
        mse_loss(alone.double()(all_inputs), all_targets).backward()
        yield Case(
            about,
            (model, *everyones[rank]),
            held=lambda model=model: [param.grad for param in model.parameters()],
            expected=[param.grad.float() for param in alone.parameters() if param.grad is not None],
            is_coded=False,
        )
