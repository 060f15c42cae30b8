"""The alpha-beta model: an all-reduce takes the latency of its messages, the time of their bytes, and that of adding.

    time = messages * alpha + bytes * beta + added * gamma

alpha is the latency of a message, beta the inverse of a link's bandwidth, gamma the seconds that adding a byte takes.
Messages, bytes and additions are counted in two ways:

- Along the critical path, what must happen one after the other, if every rank has its own cores and its own link. A
  link carries one message at a time each way. On a cluster this is the time.
- In all ranks together. Where C cores are shared by more ranks than that, C cores must do this work, however much of
  it could happen at once: the time is the larger of the critical path and the total divided by C.

`added` counts the bytes a rank itself works through: those it adds, and those it copies to keep an order.

Two levels: rank r lives on node r // R. A message inside a node costs inner_alpha + bytes * inner_beta, and no more
than one between nodes. A step in which some rank must wait for a message between nodes is a step between nodes. Every
rank has its own link out of its node.

Not in the model: what caches save, what newly allocated memory costs, and links that several messages share on the way.
Source: Hockney: The Communication Challenge for MPP (1994). This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil

ELEMENT = 4
"""Bytes: tensors of float32."""


@dataclass(frozen=True)
class Counts:
    """Messages, their bytes, and the bytes added (or copied)."""

    messages: float = 0
    bytes: float = 0
    added: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.messages + other.messages, self.bytes + other.bytes, self.added + other.added)

    def times(self, factor: float) -> Counts:
        return Counts(self.messages * factor, self.bytes * factor, self.added * factor)

    def seconds(self, alpha: float, beta: float, gamma: float) -> float:
        return self.messages * alpha + self.bytes * beta + self.added * gamma


Step = tuple[Counts, bool]
"""Part of a critical path, and whether all of it happens inside nodes."""


@dataclass(frozen=True)
class Cost:
    """The cost of an all-reduce."""

    between: Counts
    """On the critical path, in the steps between nodes."""
    inside: Counts
    """On the critical path, in the steps inside nodes."""
    total: Counts
    """Totals over all ranks."""

    @staticmethod
    def along(path: Sequence[Step], total: Counts) -> Cost:
        """The cost of these steps, one after the other."""
        between, inside = (
            reduce(Counts.__add__, (counts for counts, inner in path if inner is at), Counts()) for at in (False, True)
        )
        return Cost(between, inside, total)


@dataclass(frozen=True)
class Machine:
    """The machine, or the cluster, that an all-reduce runs on."""

    alpha: float
    """Seconds per message: the latency."""
    beta: float
    """Seconds per byte: the inverse of the bandwidth."""
    gamma: float = 0
    """Seconds per byte added."""
    cores: int | None = None
    """Cores that all ranks share; None on a cluster, where each has its own. A message costs a core as much as it costs
    inside a node, if there are any."""
    ranks_per_node: int = 1
    inner_alpha: float = 0
    """Seconds per message inside a node."""
    inner_beta: float = 0
    """Seconds per byte inside a node."""

    def seconds(self, cost: Cost) -> float:
        """Seconds that an all-reduce of this cost takes here."""
        inside = cost.inside.seconds(self.inner_alpha, self.inner_beta, self.gamma)
        path = self.seconds_of(cost.between) + inside
        if self.cores is None:
            return path
        alpha, beta = (self.inner_alpha, self.inner_beta) if self.ranks_per_node > 1 else (self.alpha, self.beta)
        return max(path, cost.total.seconds(alpha, beta, self.gamma) / self.cores)

    def seconds_of(self, counts: Counts) -> float:
        """Seconds that this takes one rank, or one core."""
        return counts.seconds(self.alpha, self.beta, self.gamma)


@dataclass(frozen=True)
class Task:
    """One all-reduce, of N ranks and S bytes."""

    size: int
    """N."""
    nbytes: int
    """S."""
    node: int = 1
    """R, the number of ranks per node."""
    batched: bool = False
    """Whether the messages of one step are started as a batch, as nccl wants them."""

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return max(1, ceil(self.nbytes / ELEMENT))

    @property
    def power(self) -> int:
        """P, the largest power of two up to N."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """E = N - P."""
        return self.size - self.power

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.size <= self.node
