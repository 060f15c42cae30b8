"""The model: what an all-reduce takes is so many messages, bytes and additions, each at its price.

    time = messages * alpha + bytes * beta + added * gamma

counted in two ways:

- Along the critical path, what must happen one after the other, if every rank has its own cores and its own link. A
  link carries one message at a time each way. On a cluster this is the time.
- In all ranks together. Where C cores are shared by more ranks than that, C cores must do this work, however much of
  it could happen at once: the time is the larger of the critical path and the total divided by C.

`added` counts the bytes a rank itself works through: those it adds, and those it copies to keep an order.

Two levels: rank r lives on node r // R. A message inside a node costs inner_alpha + bytes * inner_beta, and no more
than one between nodes. A step in which some rank must wait for a message between nodes is a step between nodes. Every
rank has its own link out of its node.

Not in the model: what caches save, what memory claimed anew costs, and links that several messages share on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil

ELEMENT = 4
"""Bytes: tensors of float32."""


@dataclass(frozen=True)
class Work:
    """Messages, their bytes, and the bytes added (or copied)."""

    messages: float = 0
    bytes: float = 0
    added: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.messages + other.messages, self.bytes + other.bytes, self.added + other.added)

    def times(self, factor: float) -> Work:
        return Work(self.messages * factor, self.bytes * factor, self.added * factor)

    def seconds(self, alpha: float, beta: float, gamma: float) -> float:
        return self.messages * alpha + self.bytes * beta + self.added * gamma


Step = tuple[Work, bool]
"""Part of a critical path, and whether all of it happens inside nodes."""


@dataclass(frozen=True)
class Cost:
    """The critical path, by what happens between and inside nodes, and the work of all ranks together."""

    between: Work
    inside: Work
    total: Work

    @staticmethod
    def along(path: Sequence[Step], total: Work) -> Cost:
        """The cost of these steps, one after the other."""
        between, inside = (
            reduce(Work.__add__, (work for work, inner in path if inner is at), Work()) for at in (False, True)
        )
        return Cost(between, inside, total)


@dataclass(frozen=True)
class Machine:
    """Seconds a message, a byte, a byte added. `cores`: of the one host all ranks share; None: a cluster."""

    alpha: float
    beta: float
    gamma: float = 0
    cores: int | None = None
    ranks_per_node: int = 1
    inner_alpha: float = 0
    inner_beta: float = 0

    def seconds(self, cost: Cost) -> float:
        """What an all-reduce of this cost takes here."""
        path = self.seconds_of(cost.between) + cost.inside.seconds(self.inner_alpha, self.inner_beta, self.gamma)
        return path if self.cores is None else max(path, self.seconds_of(cost.total) / self.cores)

    def seconds_of(self, work: Work) -> float:
        """What this work takes one rank, or one core."""
        return work.seconds(self.alpha, self.beta, self.gamma)


@dataclass(frozen=True)
class Task:
    """One all-reduce: N ranks, S bytes, R ranks a node. P, the largest power of two up to N, and E = N - P."""

    size: int
    nbytes: int
    node: int = 1

    @property
    def elements(self) -> int:
        return max(1, ceil(self.nbytes / ELEMENT))

    @property
    def power(self) -> int:
        return 1 << (self.size.bit_length() - 1)

    @property
    def extra(self) -> int:
        return self.size - self.power

    @property
    def one_node(self) -> bool:
        return self.size <= self.node
