"""The second half of the ring: what a rank has received, it passes on."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import GATHERS, OWN, Exercise, Mistake

EXERCISE = Exercise(
    forbidden=GATHERS,
    mistakes=(
        Mistake(
            "resends its own",
            {"isend(gathered[(rank - step) % size]": "isend(tensor"},
            "from step 1 on, the tensor that has just arrived is due",
        ),
        Mistake(
            "one tensor for all",
            {"[tensor.clone() for _ in range(size)]": "[tensor.clone()] * size"},
            "[x] * N is N times the same memory",
        ),
        Mistake(
            "in order of arrival",
            {"return gathered": "return [gathered[(rank - step) % size] for step in range(size)]"},
            "place r is for what rank r has, on every rank",
        ),
        Mistake("stops one step early", {"range(size - 1)": "range(size - 2)"}, "each tensor has N - 1 ranks to go to"),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, everyones = give(rank), [give(other) for other in range(size)]
        most, held = {(rank + 1) % size: len(tensor) * (size - 1)}, {OWN: tensor}
        yield Case(about, (tensor,), returns=everyones, held=held, expected={OWN: give(rank)}, most=most)
