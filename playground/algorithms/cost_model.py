"""The alpha-beta model: an all-reduce takes the latency of its messages, the time of their bytes, and that of adding.

    time = messages * alpha + bytes * beta + added * gamma

alpha is the latency of a message, beta the inverse of a link's bandwidth, gamma the seconds that adding a byte takes.
Messages, bytes and additions are counted in two ways:

- Along the critical path, what must happen one after the other, if every rank has its own cores and its own link. A
  link carries one message at a time each way. On a cluster this is the time.
- In all ranks together. Where C cores are shared by more ranks than that, C cores must do this work, however much of
  it could happen at once: the time is the larger of the critical path and the total divided by C.

`added` counts the bytes a rank itself works through: those it adds, and those it copies to keep an order.

A function `Task -> Cost` for each algorithm of all_reduce.py follows the model; but for the hierarchical one, which
differs from a ring only where messages inside a host cost less than between hosts.

Not in the model: what caches save, what newly allocated memory costs, and links that several messages share on the way.
Source: Hockney: The Communication Challenge for MPP (1994). This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

ELEMENT = 4
"""Bytes: tensors of float32."""
PIECE = 768 * 1024
"""Bytes, at most, of one message of the pipelined ring between CPUs: what was received is then still in a core's cache
when it is added, and when it is sent on. Found by trying 64 KiB to 8 MiB."""
IN_FLIGHT = 2
"""Its receives under way: while one piece is added, the next is on its way."""


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


def power_of_two(size: int) -> int:
    """P: the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


@dataclass(frozen=True)
class Cost:
    """The cost of an all-reduce."""

    path: Counts
    """On the critical path."""
    total: Counts
    """Totals over all ranks."""


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
    """Cores that all ranks share; None on a cluster, where each has its own."""

    def seconds(self, cost: Cost) -> float:
        """Seconds that an all-reduce of this cost takes here."""
        path, total = (counts.seconds(self.alpha, self.beta, self.gamma) for counts in (cost.path, cost.total))
        return path if self.cores is None else max(path, total / self.cores)


@dataclass(frozen=True)
class Task:
    """One all-reduce, of N ranks and S bytes."""

    size: int
    """N."""
    nbytes: int
    """S."""

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return max(1, ceil(self.nbytes / ELEMENT))

    @property
    def power(self) -> int:
        """P, the largest power of two up to N."""
        return power_of_two(self.size)


def reduce_broadcast_cost(task: Task) -> Cost:
    """Rank 0 receives from each of the others, one after the other, then sends to each: its link is the path."""
    root = Counts(2, 2 * task.nbytes, task.nbytes).times(task.size - 1)
    return Cost(path=root, total=root)


def all_to_all_cost(task: Task) -> Cost:
    """Every link carries N - 1 messages in and out. A rank also copies its own tensor aside, and the first one into
    place."""
    rank = Counts(1, task.nbytes, task.nbytes).times(task.size - 1) + Counts(added=2 * task.nbytes)
    return Cost(path=rank, total=rank.times(task.size))


def tutorial_ring_cost(task: Task) -> Cost:
    """N - 1 steps of a whole tensor, and one copy."""
    rank = Counts(1, task.nbytes, task.nbytes).times(task.size - 1) + Counts(added=task.nbytes)
    return Cost(path=rank, total=rank.times(task.size))


def ring_cost(task: Task, pieces: int = 1) -> Cost:
    """2 (N - 1) steps of a chunk, in pieces.

    With two pieces or more, two are in flight: while one is added the next arrives, so that of all additions only that
    of one piece is on the path. A chunk without elements is not sent.
    """
    hops, chunk = 2 * (task.size - 1), ceil(task.elements / task.size) * ELEMENT
    added = chunk * hops / 2 if pieces == 1 else chunk / pieces
    sent = min(task.size * pieces, task.elements)
    total = Counts(hops * sent, hops * task.nbytes, hops / 2 * task.nbytes)
    return Cost(path=Counts(hops * pieces, hops * chunk, added), total=total)


def pipelined_ring_cost(task: Task) -> Cost:
    """The ring, a chunk in as many pieces as it takes on CPUs."""
    return ring_cost(task, ceil(ceil(task.elements / task.size) * ELEMENT / PIECE))


def recursive_doubling_cost(task: Task) -> Cost:
    """log2 P swaps of the whole tensor."""
    swap = Counts(1, task.nbytes, task.nbytes)
    path = swap.times(len(distances(task.power)))
    return with_way_in_and_out(task, path, path.times(task.power))


def halving_doubling_cost(task: Task) -> Cost:
    """The swap over distance d carries d / P of the tensor, once to add and once to collect.

    A part without elements is not sent: over distance d there are P / d parts, each sent by d ranks.
    """
    power, steps = task.power, distances(task.power)
    messages = sum(2 * distance * min(power // distance, task.elements) for distance in steps)
    moved = (power - 1) * task.nbytes
    path = Counts(2 * len(steps), 2 * moved / power, moved / power)
    return with_way_in_and_out(task, path, Counts(messages, 2 * moved, moved))


def distances(power: int) -> list[int]:
    """1, 2, 4, … P / 2: how far apart the ranks are that swap."""
    return [1 << step for step in range(power.bit_length() - 1)]


def with_way_in_and_out(task: Task, path: Counts, total: Counts) -> Cost:
    """These costs of the first P ranks, and the way in and out of the last E, all at once: they hand in their tensor,
    and get the result."""
    way, extra = Counts(2, 2 * task.nbytes, task.nbytes), task.size - task.power
    return Cost(path=path + way.times(extra > 0), total=total + way.times(extra))


def binary_tree_cost(task: Task) -> Cost:
    """The sums go up level by level, and the result comes down; a parent's link serves its children in turn."""
    (up, additions), down = way_up(task.size), way_down(task.size)
    path = Counts(up + down, (up + down) * task.nbytes, additions * task.nbytes)
    return Cost(path=path, total=Counts(2, 2 * task.nbytes, task.nbytes).times(task.size - 1))


def subtrees(size: int) -> tuple[int, int]:
    """How many ranks lie left and right below the root of a tree of `size` that is filled level by level."""
    lowest = power_of_two(size)
    left = lowest // 2 - 1 + min(size - lowest + 1, lowest // 2)
    return left, size - 1 - left


@cache
def way_up(size: int) -> tuple[int, int]:
    """On the critical path up a tree: messages that arrive in turn, and additions.

    The left subtree is never done sooner. If the right one is done at the same time, two messages arrive in turn; if
    it is done sooner, its message has already arrived.
    """
    if size == 1:
        return 0, 0
    left, right = subtrees(size)
    messages, additions = way_up(left)
    tie = right > 0 and way_up(right)[0] == messages
    return messages + 1 + tie, additions + 1 + (right > 0)


@cache
def way_down(size: int) -> int:
    """Messages on the critical path down a tree, until the last child has its own."""
    if size == 1:
        return 0
    left, right = subtrees(size)
    return max(1 + way_down(left), 2 + way_down(right) if right else 0)
