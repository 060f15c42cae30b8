"""Judges of the exercises on collectives."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial

import torch

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.observation import OWN
from playground.exercises.repair import of_fault


def broadcast(rank: int, size: int, seed: int) -> Cases:
    """A collective of messages, from any root."""
    for place, (about, give) in enumerate(inputs()):
        root = (place + seed) % size
        tensor = give(rank)
        yield Case(f"{about}, root {root}", (tensor, root), held=tensor, expected=give(root))


def gather_uneven(rank: int, size: int, seed: int) -> Cases:
    """all_gather takes tensors of one size: what has several is padded, and the padding taken off
    again."""
    for place, (about, give) in enumerate(inputs(9, 9, 9, 9)):
        lengths = [(4 * other + 3 * place + 5) % 8 for other in range(size)]
        everyones = [give(other)[:length].clone() for other, length in enumerate(lengths)]
        # what padding is made of, in a place where there is none
        for tensor in everyones[: size * (place > 0)]:
            tensor[-1:] = (0, float("nan"), 0, -1)[place]
        about = f"elements of each rank: {', '.join(map(str, lengths))}; {about.split()[-1]}"
        yield Case(about, (everyones[rank],), returns=everyones)


def groups(rank: int, size: int, seed: int) -> Cases:
    """Two groups: every rank makes both, in the same order, and roots are named by their ranks in
    the world."""
    for about, give in inputs(6, 7):
        tensor = give(rank)
        # a group's first rank may send to each other one of it
        most = len(tensor) * max(1, (size - 1) // 2)
        notes: list[str] = []
        yield Case(
            about,
            (tensor,),
            held=tensor,
            expected=give(rank % 2),
            most_moved=most,
            run=partial(note_warnings, rank, size, tensor, notes),
            notes=notes,
        )


def note_warnings(
    rank: int,
    size: int,
    tensor: torch.Tensor,
    notes: list[str],
    function: Callable[..., object],
) -> object:
    """What the function returns. A call for a group that this rank is not in is noted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = function(rank, size, tensor)
    if any("does not belong to" in str(each.message) for each in caught):
        notes[:] = [
            "right, but ranks call a broadcast of a group that they are not in: torch warns"
        ]
    return returned


def all_to_all(rank: int, size: int, seed: int) -> Cases:
    """A matrix of chunks is transposed: chunk s of rank r, which is s + 1 times what rank r has,
    goes to rank s."""
    for about, give in inputs():
        chunks, due = ([(other + 1) * give(rank) for other in range(size)] for _ in range(2))
        returns = [(rank + 1) * give(other) for other in range(size)]
        most = dict.fromkeys(range(size), len(chunks[0]))
        held, expected = {OWN: chunks}, {OWN: due}
        yield Case(
            about,
            (chunks,),
            returns=returns,
            held=held,
            expected=expected,
            is_coded=False,
            most=most,
        )


def lost_sum(rank: int, size: int, seed: int) -> Cases:
    """Dense tables in float64, and others on one rank: transposed ones for the first fault, which
    loses the sum of those, and float32 ones for the second. The second keeps the sum of transposed
    ones, which another rank has."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, other = draw.sample(range(size), 2)
        transposed, narrow = of_fault(seed, [(culprit, None), (other, culprit)])
        digits = [[draw.randrange(1, 9) for _ in range(size)] for _ in range(2)]
        tables, sums = list[torch.Tensor](), list[torch.Tensor]()
        dtype = torch.float32 if rank == narrow else torch.float64
        for place, row in enumerate(digits):
            columns = torch.arange(2).repeat(2 + place, 1)
            table = ((row[rank] + columns) * 10**rank).to(dtype)
            if rank == transposed:
                table = table.t().contiguous().t()
            tables.append(table)
            everyones = [(digit + columns) * 10**power for power, digit in enumerate(row)]
            sums.append(sum(everyones, torch.zeros(())).to(dtype))
        notes = [
            f"given to rank {each}: {'float32' if each == narrow else 'float64'}, "
            f"{'transposed' if each == transposed else 'dense'}"
            for each in range(size)
        ]
        yield Case(
            "2 tables each",
            (tables,),
            returns={"largest": float(max(each.max() for each in sums))},
            held={"table": tables},
            expected={"table": sums},
            run=partial(name_largest, rank, size, tables),
            is_coded=False,
            culprit=culprit,
            notes=notes,
        )


def name_largest(
    rank: int, size: int, tables: list[torch.Tensor], function: Callable[..., object]
) -> dict[str, object]:
    return {"largest": function(rank, size, tables)}
