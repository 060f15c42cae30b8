"""Known data: what each rank gives, and what a reduction must make of it, exactly.

Each rank gives a pattern of its own over and over. Its length is prime, so that a piece that ended up elsewhere, or
came from another rank, does not look right. The values are whole numbers so small that every type holds them, their
sum and their product.
"""

from __future__ import annotations

import functools

import torch

from playground.algorithms.operation import ADDS, Op, kind

PERIOD = 10007
"""Elements of a pattern."""
SMALL = 64
"""No value is beyond it, and no sum."""
NOBODYS = 100
"""No rank gives it and no reduction makes it."""
FACTORS = 4
"""Ranks that multiply by something, at any one position: 3 to the 4th fits into every type."""


def given(rank: int, size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """What `rank` gives."""
    op, random = kind(op), torch.Generator().manual_seed(rank)
    if op in (Op.SUM, Op.AVG):
        most = max(1, min(SMALL, exact(dtype)) // size)
        return torch.randint(0, most + 1, (PERIOD,), generator=random)
    if op == Op.PRODUCT:
        takes_part = (torch.arange(PERIOD) + rank) % size < FACTORS
        return torch.where(takes_part, torch.randint(1, 4, (PERIOD,), generator=random), 1)
    return torch.randint(0, SMALL, (PERIOD,), generator=random)


def exact(dtype: torch.dtype) -> int:
    """The whole number up to which this type has every one."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def reduced(size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """What a reduction makes of what all ranks give."""
    op = kind(op)
    result = functools.reduce(ADDS[op], (given(rank, size, dtype, op) for rank in range(size)))
    return result / size if op == Op.AVG else result


def fill(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Write the pattern over and over."""
    pattern = pattern.to(tensor)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(pattern)
    tensor[whole:].copy_(pattern[: tensor.numel() - whole])


def wrong(tensor: torch.Tensor, pattern: torch.Tensor, start: int, slack: float = 0.0) -> int:
    """How many elements of `tensor` are not those of the pattern from position `start` on.

    `slack`: how far they may be off, relative to what they should be.
    """
    whole = tensor.numel() // PERIOD * PERIOD
    pattern = pattern.roll(-(start % PERIOD))
    rows = tensor[:whole].view(-1, PERIOD), tensor[whole:]
    expected = pattern, pattern[: tensor.numel() - whole]
    return sum(int(differ(part, right, slack).sum()) for part, right in zip(rows, expected, strict=True))


def differ(found: torch.Tensor, right: torch.Tensor, slack: float) -> torch.Tensor:
    if not slack:
        return found != right.to(found)
    right = right.to(found.device, torch.float64)
    return ~((found.double() - right).abs() <= slack * right)  # not (… > …): NaN is wrong too
