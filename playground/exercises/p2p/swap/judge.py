"""Two ranks exchange tensors, and only the order of their calls keeps them from waiting for each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.observation import OWN


def cases(rank: int, size: int, seed: int) -> Cases:
    partner = rank ^ 1 if rank ^ 1 < size else rank
    for about, give in inputs():
        tensor = give(rank)
        run, returns = partial(swap_apart, rank, size, tensor), {"returned": give(partner), OWN: give(rank)}
        yield Case(about, (tensor,), returns=returns, run=run)


def swap_apart(rank: int, size: int, tensor: torch.Tensor, function: Callable[..., object]) -> dict[str, object]:
    """What the solution returned, after its own tensor was overwritten; and what that was before."""
    returned = function(rank, size, tensor)
    own = tensor.clone()
    tensor.zero_()
    return {"returned": returned, OWN: own}
