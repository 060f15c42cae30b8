"""One collective on tensors of one size: its buffers on this rank, every way to call it, and what it must leave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import BACKEND, load_algorithm
from playground.algorithms.operation import ADDS, Op, kind
from playground.runtime import device
from playground.tools.bench.settings import COLLECTIVES, OPS, REDUCTION, BenchSettings, Collective

PERIOD = 10007
"""Elements of a pattern."""
MAX_VALUE = 64
"""No value is larger, and no sum."""
SENTINEL = 100
"""In place of every result before the call: no rank gives it and no reduction makes it."""
MAX_FACTORS = 4
"""Ranks that multiply by more than 1, at any one position: 3 to the 4th fits into every type."""


def input_pattern(rank: int, size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """The input of `rank` of `size` where `op` (None: nothing) reduces it: `PERIOD` whole numbers, on the CPU."""
    op, random = kind(op), torch.Generator().manual_seed(rank)
    if op in (Op.SUM, Op.AVG):
        # The largest number up to which the type holds every whole one.
        exact = round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
        largest = max(1, min(MAX_VALUE, exact) // size)
        return torch.randint(0, largest + 1, (PERIOD,), generator=random)
    if op == Op.PRODUCT:
        takes_part = (torch.arange(PERIOD) + rank) % size < MAX_FACTORS
        return torch.where(takes_part, torch.randint(1, 4, (PERIOD,), generator=random), 1)
    return torch.randint(0, MAX_VALUE, (PERIOD,), generator=random)


def reduction_pattern(size: int, dtype: torch.dtype, op: object) -> torch.Tensor:
    """The right result of a reduction of all ranks' inputs."""
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
    """Count the elements of `tensor` that are not those of the repeated pattern from position `start` on, and further
    off than `tolerance`, relative to the right value."""
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
    """The largest relative error of an average over `size` ranks: half an epsilon for each of N + 1 roundings, of 1/N
    (nccl multiplies by it before it adds), of a product and of N - 1 sums."""
    return (1 + torch.finfo(dtype).eps / 2) ** (size + 1) - 1


# Names that torch 2.14 introduced, or those from before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


BACKEND_CALLS: dict[str, Callable[[Buffers, Any], object]] = {
    "all_reduce": lambda buffers, op: dist.all_reduce(buffers.input, op=op),
    "broadcast": lambda buffers, op: dist.broadcast(buffers.input, src=0),
    "reduce": lambda buffers, op: dist.reduce(buffers.input, dst=0, op=op),
    "all_gather": lambda buffers, op: all_gather_single(buffers.output, buffers.input),
    "reduce_scatter": lambda buffers, op: reduce_scatter_single(buffers.output, buffers.input, op=op),
    "all_to_all": lambda buffers, op: dist.all_to_all_single(buffers.output, buffers.input),
    "gather": lambda buffers, op: dist.gather(buffers.input, buffers.output_pieces or None, dst=0),
    "scatter": lambda buffers, op: dist.scatter(buffers.output, buffers.input_pieces or None, src=0),
}
"""The backend's own call of each collective."""


class Buffers:
    """Input and output of this rank: the same tensor where the collective works in place."""

    input: torch.Tensor
    output: torch.Tensor
    input_pieces: list[torch.Tensor]
    """Pieces of `count` elements; none on a rank that gives nothing."""
    output_pieces: list[torch.Tensor]

    def __init__(self, spec: Collective, count: int, dtype: torch.dtype, rank: int, size: int) -> None:
        self.input = torch.zeros(spec.pieces_given(rank, size) * count, dtype=dtype, device=device())
        self.output = self.input
        if not spec.in_place:
            self.output = self.input.new_zeros(len(spec.pieces_expected(rank, size)) * count)
        self.input_pieces = list(self.input.split(count)) if self.input.numel() else []
        self.output_pieces = list(self.output.split(count)) if self.output.numel() else []

    def clear(self) -> None:
        """Zeros: however often they are reduced, none becomes infinite or too small for its type."""
        self.input.zero_()
        self.output.zero_()


class Workload:
    """A collective on pieces of `count` elements."""

    def __init__(self, settings: BenchSettings, collective: str, count: int, rank: int, size: int) -> None:
        self.spec, self.count, self.rank, self.size = COLLECTIVES[collective], count, rank, size
        self.op = getattr(dist.ReduceOp, OPS[settings.op])
        self.data_for = self.op if self.spec.reduces else None
        self.dtype = getattr(torch, settings.dtype)
        self.buffers = Buffers(self.spec, count, self.dtype, rank, size)

    def call(self, algorithm: str) -> Callable[[], object]:
        """A call that does it once."""
        if algorithm == BACKEND:
            return partial(BACKEND_CALLS[self.spec.name], self.buffers, self.op)
        ours = load_algorithm(self.spec.name, algorithm)
        if not self.spec.in_place:
            ours = partial(ours, self.buffers.output)
        return partial(ours, self.buffers.input, **({"op": self.op} if self.spec.reduces else {}))

    def count_wrong(self, call: Callable[[], object]) -> int:
        """Compare every element that this rank ends with, and count those that are wrong. Only an average may be off by
        rounding, see `tolerance_of_average`."""
        self.buffers.output.fill_(SENTINEL)
        fill(self.buffers.input, self.pattern(self.rank))
        call()
        tolerance = tolerance_of_average(self.size, self.dtype) if self.data_for == dist.ReduceOp.AVG else 0.0
        expected = self.spec.pieces_expected(self.rank, self.size)
        # Where nothing is expected of a rank, what its buffers hold is not defined.
        found = zip(self.buffers.output_pieces, expected, strict=False)
        return sum(
            count_wrong(piece, self.pattern(source), index * self.count, tolerance) for piece, (source, index) in found
        )

    def pattern(self, source: int) -> torch.Tensor:
        """The input of the rank `source`, or the right result of the `REDUCTION`."""
        if source == REDUCTION:
            return reduction_pattern(self.size, self.dtype, self.data_for)
        return input_pattern(source, self.size, self.dtype, self.data_for)
