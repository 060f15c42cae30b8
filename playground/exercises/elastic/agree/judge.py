"""All ranks choose one snapshot, which all of them have."""

from __future__ import annotations

import random

from playground.exercises.cases import Case, Cases


def cases(rank: int, size: int, seed: int) -> Cases:
    draw = random.Random(seed)  # the same on all ranks
    last = size - 1
    situations: dict[str, list[list[int]]] = {
        "the last rank lacks the newest": [[20, 10, 30]] * last + [[10, 20]],
        "the last rank lacks one in the middle": [[10, 20]] * last + [[30, 10]],
        "many, with gaps": [[*draw.sample(range(2, 40), 30), 1] for _ in range(size)],
        "the first step alone": [[0]] * size,
        "the last rank has none": [[10]] * last + [[]],
        "none in common": [[10 + 5 * (other % 2), 1000 + other] for other in range(size)],
    }
    for about, everyones in situations.items():
        common = [step for step in everyones[0] if all(step in each for each in everyones)]
        newest = sorted(common)[-1] if common else None
        yield Case(about, (list(everyones[rank]),), returns=newest, is_coded=False)
