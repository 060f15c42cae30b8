"""Each collective as it is measured: its memory on this rank, how it is called, and what it must leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import ALGORITHMS
from playground.measure import known
from playground.measure.plan import BACKEND, OPS, SHAPES, Plan
from playground.runtime import device

ALL = -1
"""In place of a rank's number: what the reduction makes of all."""
Piece = tuple[int, int]
"""(whose, which): the piece of `count` elements that stands there in what that rank, or `ALL`, gives."""


@dataclass(frozen=True)
class Collective:
    """What a rank gives and ends with, in pieces of `count` elements."""

    call: Callable[[Memory, Any], object]
    expected: Callable[[int, int], list[Piece]]
    """Of (rank, size): what this rank ends with; nothing where that is not defined."""
    gives: Callable[[int, int], int] = lambda rank, size: 1
    in_place: bool = False


def from_each(rank: int, size: int) -> list[Piece]:
    return [(other, 0) for other in range(size)]


COLLECTIVES = {
    "all_reduce": Collective(
        lambda memory, op: dist.all_reduce(memory.given, op=op), lambda rank, size: [(ALL, 0)], in_place=True
    ),
    "broadcast": Collective(
        lambda memory, op: dist.broadcast(memory.given, src=0), lambda rank, size: [(0, 0)], in_place=True
    ),
    "reduce": Collective(
        lambda memory, op: dist.reduce(memory.given, dst=0, op=op),
        lambda rank, size: [(ALL, 0)] if rank == 0 else [],
        in_place=True,
    ),
    "all_gather": Collective(lambda memory, op: dist.all_gather_into_tensor(memory.received, memory.given), from_each),
    "reduce_scatter": Collective(
        lambda memory, op: dist.reduce_scatter_tensor(memory.received, memory.given, op=op),
        lambda rank, size: [(ALL, rank)],
        gives=lambda rank, size: size,
    ),
    "all_to_all": Collective(
        lambda memory, op: dist.all_to_all_single(memory.received, memory.given),
        lambda rank, size: [(other, rank) for other in range(size)],
        gives=lambda rank, size: size,
    ),
    "gather": Collective(
        lambda memory, op: dist.gather(memory.given, memory.pieces_received or None, dst=0),
        lambda rank, size: from_each(rank, size) if rank == 0 else [],
    ),
    "scatter": Collective(
        lambda memory, op: dist.scatter(memory.received, memory.pieces_given or None, src=0),
        lambda rank, size: [(0, rank)],
        gives=lambda rank, size: size if rank == 0 else 0,
    ),
}


class Memory:
    """What this rank gives and receives: the same tensor where the collective works in place."""

    given: torch.Tensor
    received: torch.Tensor
    pieces_given: list[torch.Tensor]
    pieces_received: list[torch.Tensor]

    def __init__(self, collective: Collective, count: int, dtype: torch.dtype, rank: int, size: int) -> None:
        self.given = torch.zeros(collective.gives(rank, size) * count, dtype=dtype, device=device())
        self.received = self.given
        if not collective.in_place:
            self.received = self.given.new_zeros(len(collective.expected(rank, size)) * count)
        self.pieces_given = list(self.given.split(count)) if self.given.numel() else []
        self.pieces_received = list(self.received.split(count)) if self.received.numel() else []

    def clear(self) -> None:
        """Zeros: whatever is done to them however often, none becomes infinite or too small for its type."""
        self.given.zero_()
        self.received.zero_()


class Task:
    """One collective on pieces of `count` elements."""

    def __init__(self, plan: Plan, collective: str, count: int, rank: int, size: int) -> None:
        self.collective, self.count, self.rank, self.size = COLLECTIVES[collective], count, rank, size
        self.op = getattr(dist.ReduceOp, OPS[plan.op])
        self.data_for = self.op if SHAPES[collective].reduces else None
        self.dtype = getattr(torch, plan.dtype)
        self.memory = Memory(self.collective, count, self.dtype, rank, size)

    def call(self, algorithm: str) -> Callable[[], object]:
        """What does it once."""
        if algorithm == BACKEND:
            return lambda: self.collective.call(self.memory, self.op)
        all_reduce = ALGORITHMS[algorithm]
        return lambda: all_reduce(self.memory.given, self.op)

    def wrong(self, call: Callable[[], object]) -> int:
        """How many elements of what this rank ends with are wrong, every one compared.

        Only an average may be off by what rounding can do, see `slack_of_average`.
        """
        self.memory.received.fill_(known.NOBODYS)
        known.fill(self.memory.given, known.given(self.rank, self.size, self.dtype, self.data_for))
        call()
        slack = 0.0
        if self.data_for == dist.ReduceOp.AVG:
            slack = slack_of_average(self.size, self.dtype)
        found = zip(self.memory.pieces_received, self.collective.expected(self.rank, self.size), strict=False)
        return sum(
            known.wrong(piece, self.pattern(whose), which * self.count, slack) for piece, (whose, which) in found
        )

    def pattern(self, whose: int) -> torch.Tensor:
        if whose == ALL:
            return known.reduced(self.size, self.dtype, self.data_for)
        return known.given(whose, self.size, self.dtype, self.data_for)


def slack_of_average(size: int, dtype: torch.dtype) -> float:
    """How far an average over `size` ranks may be off, relative to its value: half an epsilon for every rounding.

    A backend divides after it has added, or multiplies by 1/N before (nccl), and then 1/N itself is rounded too: N + 1
    roundings one after the other, of 1/N, of a product and of N - 1 sums.
    """
    return (1 + torch.finfo(dtype).eps / 2) ** (size + 1) - 1
