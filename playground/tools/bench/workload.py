"""One collective on tensors of one size: its buffers on this rank, every way to call it, and what it must leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from playground.algorithms import BACKEND, load_algorithm
from playground.runtime import device
from playground.tools.bench import known_data
from playground.tools.bench.collectives import COLLECTIVES, REDUCTION, CollectiveSpec
from playground.tools.bench.settings import OPS, BenchSettings


class Buffers:
    """What this rank gives and receives: the same tensor where the collective works in place."""

    input: torch.Tensor
    output: torch.Tensor
    input_pieces: list[torch.Tensor]
    """Of `count` elements each; none on a rank that gives nothing."""
    output_pieces: list[torch.Tensor]

    def __init__(self, spec: CollectiveSpec, count: int, dtype: torch.dtype, rank: int, size: int) -> None:
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
            return partial(self.spec.backend_call.load(), self.buffers, self.op)
        ours = load_algorithm(self.spec.name, algorithm)
        if not self.spec.in_place:
            ours = partial(ours, self.buffers.output)
        return partial(ours, self.buffers.input, **({"op": self.op} if self.spec.reduces else {}))

    def count_wrong(self, call: Callable[[], object]) -> int:
        """How many elements of what this rank ends with are wrong, every one compared.

        Only an average may be off by what rounding can do, see `tolerance_of_average`.
        """
        self.buffers.output.fill_(known_data.SENTINEL)
        known_data.fill(self.buffers.input, self.pattern(self.rank))
        call()
        tolerance = 0.0
        if self.data_for == dist.ReduceOp.AVG:
            tolerance = known_data.tolerance_of_average(self.size, self.dtype)
        expected = self.spec.pieces_expected(self.rank, self.size)
        # Where nothing is expected of a rank, what its buffers hold is not defined.
        found = zip(self.buffers.output_pieces, expected, strict=False)
        return sum(
            known_data.count_wrong(piece, self.pattern(source), index * self.count, tolerance)
            for piece, (source, index) in found
        )

    def pattern(self, source: int) -> torch.Tensor:
        """What the rank `source` gives, or what the `REDUCTION` must leave."""
        if source == REDUCTION:
            return known_data.reduction_pattern(self.size, self.dtype, self.data_for)
        return known_data.input_pattern(source, self.size, self.dtype, self.data_for)
