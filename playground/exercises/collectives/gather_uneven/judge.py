"""all_gather takes tensors of one size: what has several is padded, and the padding taken off again."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import ERROR, Exercise, Mistake

EXERCISE = Exercise(
    mistakes=(
        Mistake("padding kept", {"each[: int(length)]": "each"}, "a shorter tensor ends where its own length says"),
        Mistake(
            "cut to its own length",
            {"each[: int(length)]": "each[: len(tensor)]"},
            "the others have lengths of their own",
        ),
        Mistake(
            "own length assumed",
            {"max(int(length) for length in lengths)": "len(tensor)"},
            "the ranks' tensors have to have one size",
            ERROR,
        ),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for place, (about, give) in enumerate(inputs(9, 9, 9, 9)):
        lengths = [(4 * other + 3 * place + 5) % 8 for other in range(size)]
        everyones = [give(other)[:length].clone() for other, length in enumerate(lengths)]
        for tensor in everyones[: size * (place > 0)]:  # what padding is made of, in a place where there is none
            tensor[-1:] = (0, float("nan"), 0, -1)[place]
        lengths_told = ", ".join(map(str, lengths))
        yield Case(f"{lengths_told} elements, {about.split()[-1]}", (everyones[rank],), returns=everyones)
