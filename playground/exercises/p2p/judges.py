"""Judges of the exercises on p2p."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.observation import OWN, RESULT


def handover(rank: int, size: int, seed: int) -> Cases:
    """The first message: from rank 0 to rank 1, past all others."""
    for about, give in inputs():
        tensor = give(rank)
        most = {1: len(tensor)} if rank == 0 else {}
        yield Case(
            about, (tensor,), held=tensor, expected=give(0 if rank == 1 else rank), most=most
        )


def swap(rank: int, size: int, seed: int) -> Cases:
    """Two ranks exchange tensors, and only the order of their calls keeps them from waiting for
    each other."""
    partner = rank ^ 1 if rank ^ 1 < size else rank
    for about, give in inputs():
        tensor = give(rank)
        run = partial(swap_apart, rank, size, tensor)
        returns = {RESULT: give(partner), OWN: give(rank)}
        yield Case(
            about,
            (tensor,),
            returns=returns,
            run=run,
            most={partner: len(tensor)} if partner != rank else {},
            returns_a_copy=True,
        )


def swap_apart(
    rank: int, size: int, tensor: torch.Tensor, function: Callable[..., object]
) -> dict[str, object]:
    """The solution's return value after its own tensor was overwritten, and that tensor before."""
    returned = function(rank, size, tensor)
    own = tensor.clone()
    tensor.zero_()
    return {RESULT: returned, OWN: own}


def shift(rank: int, size: int, seed: int) -> Cases:
    """Requests: between a call and its wait(), a tensor belongs to the backend."""
    for place, (about, give) in enumerate(inputs()):
        tensor = give(rank)
        due = give((rank - 1) % size)
        most = {(rank + 1) % size: len(tensor)}
        delay = 0.02 * ((rank + place) % 2)
        yield Case(about, (tensor,), held=tensor, expected=due, most=most, delay=delay)


def token_ring(rank: int, size: int, seed: int) -> Cases:
    """A token goes round: somebody has to begin."""
    for about, give in inputs():
        tensor, added = give(rank), range(size) if rank == 0 else range(rank + 1)
        total = sum(give(other) for other in added)
        most, held = {(rank + 1) % size: len(tensor)}, {OWN: tensor}
        yield Case(
            about, (tensor,), returns=total, held=held, expected={OWN: give(rank)}, most=most
        )


def column(rank: int, size: int, seed: int) -> Cases:
    """A column is a view whose elements do not lie side by side: it is sent, and received, by way
    of a copy."""
    for about, give in inputs(16, 16, 9):
        side = int(give(0).numel() ** 0.5)
        matrix, expected = give(rank).view(side, side), give(rank).view(side, side)
        index = side - 2
        if rank == 1:
            expected[:, index] = give(0).view(side, side)[:, index]
        most = side if rank == 0 else 0
        yield Case(about, (matrix, index), held=matrix, expected=expected, most=most)
