"""Who works on what: as even as can be, all samples, each once."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import ERROR, Exercise, Mistake

LONGER = "(rank < rest)"
EXERCISE = Exercise(
    mistakes=(
        Mistake(
            "drops the remainder", {"min(rank, rest)": "0", LONGER: "0"}, "the last samples % size are in no share"
        ),
        Mistake("shares overlap", {LONGER: "(rest > 0)"}, "the first sample of one is the last of another"),
        Mistake(
            "the last one takes the remainder",
            {"min(rank, rest)": "0", LONGER: "rest * (rank == size - 1)"},
            "the others wait for it in every epoch",
        ),
        Mistake(
            "an empty share crashes",
            {"    return": "    range(0, samples, each)\n    return"},
            "there may be fewer samples than ranks",
            ERROR,
        ),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for samples in (7, 12, 60_000, 2, 1, 0):
        ends = [0]
        for other in range(size):
            ends.append(ends[-1] + (samples - ends[-1] + size - other - 1) // (size - other))
        about, due = f"{samples:,} sample{'s' * (samples != 1)}", (ends[rank], ends[rank + 1])
        yield Case(about, (samples,), returns=due, is_coded=False)
