"""The first half of the ring: every chunk travels round once, and is added to on its way."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import Exercise, Mistake

EXERCISE = Exercise(
    forbidden=("reduce_scatter", "reduce_scatter_tensor", "all_reduce"),
    mistakes=(
        Mistake(
            "chunk off by one",
            {"rank - step)": "rank - step + 1)", "rank - step - 1)": "rank - step)"},
            "each sum ends one rank too early",
        ),
        Mistake("replaces instead of adding", {"mine += theirs": "mine.copy_(theirs)"}),
        Mistake(
            "reduces in place while sending",
            {"theirs = torch.empty_like(mine)": "theirs = outgoing"},
            "what is being sent may not change before wait()",
        ),
        Mistake(
            "sends its own chunk each time",
            {
                "    for step": "    given = tensor.clone().tensor_split(size)\n    for step",
                "outgoing = chunks[": "outgoing = given[",
            },
            "the sums so far do not travel on",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        chunks = tensor.tensor_split(size)
        most = {(rank + 1) % size: len(tensor) - len(chunks[rank])}
        yield Case(about, (tensor,), held=chunks[rank], expected=total.tensor_split(size)[rank], most=most)
