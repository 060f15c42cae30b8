"""Known data: what each rank gives, and what a reduction must make of it, exactly.

Each rank gives a pattern of its own, repeated. Its length is prime, so that a piece that ended up elsewhere, or came
from another rank, does not look right. The values are whole numbers so small that every type holds them, their sum and
their product.
"""

from __future__ import annotations

import functools

import torch

from playground.algorithms.operation import ADDS, Op, kind

PERIOD = 10007
"""Elements of a pattern."""
MAX_VALUE = 64
"""No value is larger, and no sum."""
SENTINEL = 100
"""In place of every result before the call: no rank gives it and no reduction makes it."""
MAX_FACTORS = 4
"""Ranks that multiply by more than 1, at any one position: 3 to the 4th fits into every type."""


def input_pattern(rank: int, size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """What `rank` of `size` gives where `op` (None: nothing) reduces it: `PERIOD` whole numbers, on the CPU."""
    op, random = kind(op), torch.Generator().manual_seed(rank)
    if op in (Op.SUM, Op.AVG):
        largest = max(1, min(MAX_VALUE, largest_exact(dtype)) // size)
        return torch.randint(0, largest + 1, (PERIOD,), generator=random)
    if op == Op.PRODUCT:
        takes_part = (torch.arange(PERIOD) + rank) % size < MAX_FACTORS
        return torch.where(takes_part, torch.randint(1, 4, (PERIOD,), generator=random), 1)
    return torch.randint(0, MAX_VALUE, (PERIOD,), generator=random)


def largest_exact(dtype: torch.dtype) -> int:
    """The largest number up to which this type holds every whole one."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def reduction_pattern(size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """What a reduction must make of what all ranks give."""
    op = kind(op)
    patterns = (input_pattern(rank, size, dtype, op) for rank in range(size))
    result = functools.reduce(ADDS[op], patterns)
    return result / size if op == Op.AVG else result


def fill(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Write the pattern again and again."""
    pattern = pattern.to(tensor)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(pattern)
    tensor[whole:].copy_(pattern[: tensor.numel() - whole])


def count_wrong(tensor: torch.Tensor, pattern: torch.Tensor, start: int, tolerance: float = 0.0) -> int:
    """How many elements of `tensor` are not those of the repeated pattern from position `start` on.

    `tolerance`: how far they may be off, relative to what they must be.
    """
    whole = tensor.numel() // PERIOD * PERIOD
    pattern = pattern.roll(-(start % PERIOD))
    rows = tensor[:whole].view(-1, PERIOD), tensor[whole:]
    expected = pattern, pattern[: tensor.numel() - whole]
    return sum(int(differ(part, right, tolerance).sum()) for part, right in zip(rows, expected, strict=True))


def differ(found: torch.Tensor, right: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Where `found` is not `right`: True or False per element."""
    if not tolerance:
        return found != right.to(found)
    right = right.to(found.device, torch.float64)
    return ~((found.double() - right).abs() <= tolerance * right)  # not (… > …): NaN is wrong too


def tolerance_of_average(size: int, dtype: torch.dtype) -> float:
    """How far an average over `size` ranks may be off, relative to its value: half an epsilon for every rounding.

    A backend divides after it has added, or multiplies by 1/N before (nccl), and then 1/N itself is rounded too: N + 1
    roundings one after the other, of 1/N, of a product and of N - 1 sums.
    """
    return (1 + torch.finfo(dtype).eps / 2) ** (size + 1) - 1
