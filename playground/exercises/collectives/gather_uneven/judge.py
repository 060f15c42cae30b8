"""all_gather takes tensors of one size: what has several is padded, and the padding taken off again."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for place, (about, give) in enumerate(inputs(9, 9, 9, 9)):
        lengths = [(4 * other + 3 * place + 5) % 8 for other in range(size)]
        everyones = [give(other)[:length].clone() for other, length in enumerate(lengths)]
        for tensor in everyones[: size * (place > 0)]:  # what padding is made of, in a place where there is none
            tensor[-1:] = (0, float("nan"), 0, -1)[place]
        about = f"{', '.join(map(str, lengths))} elements, {about.split()[-1]}"
        yield Case(about, (everyones[rank],), returns=everyones)
