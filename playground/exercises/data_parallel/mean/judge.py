"""The mean over samples, where ranks have different numbers of them."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

TOTAL = "    total[0], total[1] = losses.sum(), len(losses)\n"
SAMPLES = {
    "3 samples each": (3,) * 5,
    "1 sample on rank 0, 3 on rank 1, …": (1, 3, 2, 5, 4),
    "none on rank 1": (2, 0, 3, 1, 2),
    "100,000 samples on rank 0": (100_000, 1, 0, 2, 3),
}
EXERCISE = Exercise(
    mistakes=(
        Mistake(
            "mean of means",
            {TOTAL: "    total[0], total[1] = losses.mean(), 1\n"},
            "a sample weighs more on a rank that has few",
        ),
        Mistake("own samples only", {"    dist.all_reduce(total)\n": ""}, "nothing is asked of the other ranks"),
        Mistake(
            "the sum of means",
            {TOTAL: "    total[0], total[1] = losses.mean(), 1 / size\n"},
            "the number of ranks is left out",
        ),
        Mistake(
            "a rank without samples stays away",
            {TOTAL: f"    if not len(losses):\n        return 0.0\n{TOTAL}"},
            "the others wait for it in all_reduce",
            DEADLOCK,
        ),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch

    for about, samples in SAMPLES.items():
        everyones = [torch.arange(number) % 5 + 10.0**other for other, number in enumerate(samples[:size])]
        due = torch.cat(everyones).double().mean().item()
        yield Case(about, (everyones[rank],), returns=due, is_coded=False)
