import random
from collections.abc import Callable

SEED = 0
RANK = 3


def own_order(
    rank: int,
    size: int,
    samples: int,
    epochs: int,
    augment: Callable[[int, random.Random], bool],
) -> list[list[int]]:
    """Return the numbers of the samples that this rank trains on, by epoch.

    `augment(number, generator)` prepares a sample, and returns whether it can
    be used. Where a sample is damaged, it draws from the generator.
    """
    shuffles, changes = random.Random(0), random.Random(rank + 1)
    order = list(range(samples))
    taken = []
    for _ in range(epochs):
        shuffles.shuffle(order)
        usable = []
        for number in order[rank::size]:
            if augment(number, changes):
                usable.append(number)
        taken.append(usable)
    return taken
