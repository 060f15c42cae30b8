"""Judges of the exercises on failures: programs to be repaired."""

from __future__ import annotations

import random
from functools import partial

import torch

from playground.exercises.cases import Case, Cases, coded
from playground.exercises.repair import of_fault


def lost_token(rank: int, size: int, seed: int) -> Cases:
    """A route of all ranks, and their numbers, of which one is zero: not that of an end."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        route = draw.sample(range(size), size)
        numbers = [10**other for other in range(size)]
        culprit = route[draw.randrange(1, size - 1)]
        numbers[culprit] = 0
        about = f"the route {', '.join(map(str, route))}"
        yield Case(about, (route, numbers[rank]), sum(numbers), is_coded=False, culprit=culprit)


def stuck(rank: int, size: int, seed: int) -> Cases:
    """Batches of different numbers, one of them empty. At fault is the rank that has fewest, or the
    one that has the empty batch. The most batches are others in each case: the number of steps is
    none to be written down."""
    most = 0
    for each in (seed, seed + 1):
        draw = random.Random(each)
        lengths = draw.sample(range(3, 3 + 2 * size), size)
        lengths = [length + (max(lengths) == most) for length in lengths]
        most = max(lengths)
        shares = [[[draw.randrange(1, 9)] for _ in range(length)] for length in lengths]
        unlucky = draw.randrange(size)
        shares[unlucky][1] = []
        sums = [
            sum(sum(share[step]) for share in shares if step < len(share)) for step in range(most)
        ]
        culprit = of_fault(seed, [lengths.index(min(lengths)), unlucky])
        about = f"batches of each rank: {', '.join(map(str, lengths))}"
        yield Case(about, (shares[rank],), sums, is_coded=False, culprit=culprit)


def wrong_offset(rank: int, size: int, seed: int) -> Cases:
    """One share is longer than the others, neither the first nor the last."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, length = draw.randrange(1, size - 1), draw.randrange(3, 6)
        sizes = [length + 2 * (other == culprit) for other in range(size)]
        whole = torch.cat([coded(other, own) for other, own in enumerate(sizes)])
        about = f"elements of each rank: {', '.join(map(str, sizes))}"
        yield Case(about, (sizes, coded(rank, sizes[rank])), whole, culprit=culprit)


def not_a_number(rank: int, size: int, seed: int) -> Cases:
    """One rank has no target, another has an infinite loss where it has none."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        empty, infinite = draw.sample(range(size), 2)
        losses = [torch.tensor([draw.randrange(1, 9) / 2 for _ in range(6)]) for _ in range(size)]
        masks = [torch.arange(6) < draw.randrange(1, 6) for _ in range(size)]
        masks[empty][:] = False
        losses[infinite][-1] = torch.inf
        chosen = torch.cat([loss[mask] for loss, mask in zip(losses, masks, strict=True)])
        notes = [
            f"given to rank {other}: {int(masks[other].sum())} targets of 6, the largest loss "
            f"{losses[other].max():g}"
            for other in range(size)
        ]
        yield Case(
            "6 tokens each",
            (losses[rank], masks[rank]),
            chosen.mean().item(),
            is_coded=False,
            culprit=of_fault(seed, [empty, infinite]),
            notes=notes,
        )


def slow_rank(rank: int, size: int, seed: int) -> Cases:
    """Documents of few tokens, and a long one on one rank. Work is counted, not timed."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit = draw.randrange(size)
        shares = [[draw.randrange(2, 9) for _ in range(6)] for _ in range(size)]
        shares[culprit][draw.randrange(6)] = 100
        computed: list[int] = []
        padded = [
            sum(2 * length for length in sorted(share, reverse=True)[::2]) for share in shares
        ]
        yield Case(
            f"{len(shares[rank])} documents each",
            (shares[rank], partial(compute, computed)),
            held=partial(describe_work, computed),
            expected={"tokens computed": padded[rank]},
            is_coded=False,
            culprit=culprit,
        )


def compute(computed: list[int], number: int, length: int) -> float:
    """The work on `number` documents that are padded to `length`. `computed`: the tokens so far."""
    computed.append(number * length)
    return float(number * length)


def describe_work(computed: list[int]) -> dict[str, int]:
    return {"tokens computed": sum(computed)}


def mixed_gradients(rank: int, size: int, seed: int) -> Cases:
    """Gradients in alphabetical order, of which each is larger than the one before. On the rank at
    fault, the first and another have changed places, in the dictionary and in size."""
    names = ("bias", "scale", "weight")
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit = draw.randrange(size)
        places = [[*range(len(names))] for _ in range(size)]
        swapped = draw.randrange(1, len(names))
        places[culprit][0] = swapped
        places[culprit][swapped] = 0
        digits = [sorted(draw.sample(range(1, 10), len(names))) for _ in range(size)]
        own = {
            names[place]: torch.full((2,), digit * 10**rank)
            for place, digit in zip(places[rank], digits[rank], strict=True)
        }
        sums = {name: torch.zeros(2, dtype=torch.int64) for name in names}
        for other in range(size):
            for place, digit in zip(places[other], digits[other], strict=True):
                sums[names[place]] += digit * 10**other
        yield Case("3 parameters", (own,), sums, is_coded=False, culprit=culprit)
