"""The alpha-beta model: an all-reduce takes the latency of its messages, the time of their bytes,
and that of adding.

    time = messages * alpha + bytes * beta + added * gamma

alpha is the latency of a message, beta the inverse of a link's bandwidth, gamma the seconds that
adding a byte takes. Messages, bytes and additions are counted in two ways:

- Along the critical path, what must happen one after the other, if every rank has its own cores and
  its own link. A link carries one message at a time each way. On a cluster this is the time.
- In all ranks together, where all ranks share C cores. With any number of cores what depends on
  something else would still wait for it: this is the depth. Of messages that are under way at once
  it has one. The time is depth + (total - depth) / C, the most that C cores take if none is idle
  while there is work (Brent).

`added` counts the bytes a rank itself works through: those it adds, and those it copies to keep an
order.

Two levels: rank r lives on node r // R. A message inside a node costs inner_alpha + bytes *
inner_beta, and no more than one between nodes. A step in which some rank must wait for a message
between nodes is a step between nodes. Every rank has its own link out of its node.

A function `Task -> Cost` for each algorithm of all_reduce.py follows the model.

Not in the model: what caches save, what newly allocated memory costs, and links that several
messages share on the way. Sources: Hockney: The Communication Challenge for MPP (1994); Brent: The
Parallel Evaluation of General Arithmetic Expressions (1974). This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from playground.algorithms.bytes_sent import TIMES_SENT

ELEMENT = 4
"""Bytes: tensors of float32."""
RING_PIECE = 768 * 1024
"""Bytes, at most, of one message of the pipelined ring between CPUs: what was received is then
still in a core's cache when it is added, and when it is sent on. Found by trying 64 KiB to 8
MiB."""
IN_FLIGHT = 2
"""Its receives under way: while one piece is added, the next is on its way."""


@dataclass(frozen=True)
class Counts:
    """Messages, their bytes, and the bytes added (or copied)."""

    messages: float = 0
    bytes: float = 0
    added: float = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.messages + other.messages, self.bytes + other.bytes, self.added + other.added
        )

    def __sub__(self, other: Counts) -> Counts:
        return self + other.times(-1)

    def times(self, factor: float) -> Counts:
        return Counts(self.messages * factor, self.bytes * factor, self.added * factor)

    def seconds(self, alpha: float, beta: float, gamma: float) -> float:
        return self.messages * alpha + self.bytes * beta + self.added * gamma


def power_of_two(size: int) -> int:
    """P: the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


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
    depth: Counts
    """What any number of cores must do one after the other."""

    @staticmethod
    def along(path: Sequence[Step], total: Counts, depth: Counts | None = None) -> Cost:
        """The cost of these steps, one after the other; that is also the depth, unless given."""
        between, inside = (
            sum((counts for counts, inner in path if inner is at), Counts()) for at in (False, True)
        )
        return Cost(between, inside, total, depth or between + inside)


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
    """Cores that all ranks share; None on a cluster, where each has its own. A message costs a core
    as much as it costs inside a node, if there are any."""
    ranks_per_node: int = 1
    inner_alpha: float = 0
    """Seconds per message inside a node."""
    inner_beta: float = 0
    """Seconds per byte inside a node."""

    def seconds(self, cost: Cost) -> float:
        """Seconds that an all-reduce of this cost takes here."""
        inside = cost.inside.seconds(self.inner_alpha, self.inner_beta, self.gamma)
        path = cost.between.seconds(self.alpha, self.beta, self.gamma) + inside
        if self.cores is None:
            return path
        if self.ranks_per_node > 1:  # the path waits for links, too
            rest = cost.total - cost.between - cost.inside
            return path + rest.seconds(self.inner_alpha, self.inner_beta, self.gamma) / self.cores
        work = cost.depth + (cost.total - cost.depth).times(1 / self.cores)
        return work.seconds(self.alpha, self.beta, self.gamma)


@dataclass(frozen=True)
class Task:
    """One all-reduce, of N ranks and S bytes."""

    size: int
    """N."""
    nbytes: int
    """S."""
    node: int = 1
    """R, the number of ranks per node."""

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return max(1, ceil(self.nbytes / ELEMENT))

    @property
    def power(self) -> int:
        """P, the largest power of two up to N."""
        return power_of_two(self.size)

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.size <= self.node


def reduce_broadcast_cost(task: Task) -> Cost:
    """Rank 0 receives from each of the others, one after the other, then sends to each: its link is
    the path.

    Of the others, the ranks of its own node are inside.
    """
    others, beside = task.size - 1, min(task.size, task.node) - 1
    both_ways = Counts(2, 2 * task.nbytes, task.nbytes)
    path = [(both_ways.times(beside), True), (both_ways.times(others - beside), False)]
    return Cost.along(path, both_ways.times(others))


def all_to_all_cost(task: Task) -> Cost:
    """Every link carries N - 1 messages in and out. The path is that of a rank on the last node,
    the least filled: most of its messages go between nodes. A rank also copies its own tensor
    aside, and the first one into place.
    """
    others = task.size - 1
    beside = others if task.one_node else others % task.node
    one, copies = Counts(1, task.nbytes, task.nbytes), Counts(added=2 * task.nbytes)
    path = [(one.times(beside), True), (one.times(others - beside) + copies, False)]
    depth = Counts(1, task.nbytes, others * task.nbytes) + copies
    return Cost.along(path, (one.times(others) + copies).times(task.size), depth)


def tutorial_ring_cost(task: Task) -> Cost:
    """N - 1 steps of a whole tensor, and one copy. Beyond one node, each step waits for the link
    between nodes."""
    rank = Counts(1, task.nbytes, task.nbytes).times(task.size - 1) + Counts(added=task.nbytes)
    return Cost.along([(rank, task.one_node)], rank.times(task.size))


def ring_cost(task: Task, pieces: int = 1) -> Cost:
    """2 (N - 1) steps of a chunk, in pieces; beyond one node, each step waits for the link between
    nodes.

    With two pieces or more, two are in flight: while one is added the next arrives, so that of all
    additions only that of one piece is on the path. A chunk without elements is not sent.
    """
    hops = TIMES_SENT["all_reduce"] * (task.size - 1)
    chunk = ceil(task.elements / task.size) * ELEMENT
    added = chunk * hops / 2 if pieces == 1 else chunk / pieces
    sent = min(task.size * pieces, task.elements)
    total = Counts(hops * sent, hops * task.nbytes, hops / 2 * task.nbytes)
    return Cost.along([(Counts(hops * pieces, hops * chunk, added), task.one_node)], total)


def pipelined_ring_cost(task: Task) -> Cost:
    """The ring, a chunk in as many pieces as it takes on CPUs."""
    return ring_cost(task, ceil(ceil(task.elements / task.size) * ELEMENT / RING_PIECE))


def recursive_doubling_cost(task: Task) -> Cost:
    """log2 P swaps of the whole tensor."""
    swap = Counts(1, task.nbytes, task.nbytes)
    path = [(swap, is_near(task, distance)) for distance in distances(task.power)]
    return with_way_in_and_out(task, path, swap.times(task.power * len(path)))


def halving_doubling_cost(task: Task) -> Cost:
    """The swap over distance d carries d / P of the tensor, once to add and once to collect.

    A part without elements is not sent: over distance d there are P / d parts, each sent by d
    ranks.
    """
    path, messages = list[Step](), 0
    for distance in distances(task.power):
        part = task.nbytes * distance / task.power
        path.append((Counts(2, 2 * part, part), is_near(task, distance)))
        messages += 2 * distance * min(task.power // distance, task.elements)
    moved = (task.power - 1) * task.nbytes
    return with_way_in_and_out(task, path, Counts(messages, 2 * moved, moved))


def distances(power: int) -> list[int]:
    """1, 2, 4, … P / 2: how far apart the ranks are that swap."""
    return [1 << step for step in range(power.bit_length() - 1)]


def is_near(task: Task, distance: int) -> bool:
    """Whether all who swap over `distance` do so inside nodes: blocks of 2 * distance ranks must
    not straddle two."""
    return task.power <= task.node or task.node % (2 * distance) == 0


def with_way_in_and_out(task: Task, path: list[Step], total: Counts) -> Cost:
    """These costs of the first P ranks, and the way in and out of the last E, all at once: they
    hand in their tensor, and get the result."""
    way, extra = Counts(2, 2 * task.nbytes, task.nbytes), task.size - task.power
    return Cost.along([*path, *([(way, task.one_node)] if extra else [])], total + way.times(extra))


def binary_tree_cost(task: Task) -> Cost:
    """The sums go up and the result comes down; a parent's link serves its children in turn. Beyond
    one node, the path goes between nodes."""
    arriving, additions = path_up(task.size)
    nbytes = task.nbytes
    messages = arriving + path_down(task.size)
    path = [(Counts(messages, messages * nbytes, additions * nbytes), task.one_node)]
    levels = len(distances(task.power))
    depth = Counts(2 * levels, 2 * levels * nbytes, additions * nbytes)
    return Cost.along(path, Counts(2, 2 * nbytes, nbytes).times(task.size - 1), depth)


def subtrees(size: int) -> tuple[int, int]:
    """How many ranks lie left and right below the root of a tree of `size` that is filled level by
    level."""
    lowest = power_of_two(size)
    left = lowest // 2 - 1 + min(size - lowest + 1, lowest // 2)
    return left, size - 1 - left


@cache
def path_up(size: int) -> tuple[int, int]:
    """On the critical path up a tree: messages that arrive in turn, and additions.

    The left subtree is never done sooner. If the right one is done at the same time, two messages
    arrive in turn; if it is done sooner, its message has already arrived.
    """
    if size == 1:
        return 0, 0
    left, right = subtrees(size)
    messages, additions = path_up(left)
    tie = right > 0 and path_up(right)[0] == messages
    return messages + 1 + tie, additions + 1 + (right > 0)


@cache
def path_down(size: int) -> int:
    """Messages on the critical path down a tree: a parent sends to its left child first."""
    if size == 1:
        return 0
    left, right = subtrees(size)
    return max(1 + path_down(left), 2 + path_down(right) if right else 0)


def hierarchical_cost(task: Task) -> Cost:
    """Two rings: inside, of a chunk per rank of a host; between, of one rank per host, on that
    chunk. Where the last host has fewer ranks than the others, it is the pipelined ring.
    """
    shares = min(task.size, task.node)
    if task.size % shares:
        return pipelined_ring_cost(task)
    hosts = task.size // shares
    hops = 2 * (shares - 1)
    chunk = ceil(task.elements / shares) * ELEMENT
    between = pipelined_ring_cost(Task(hosts, chunk))
    rings = Counts(
        hops * min(shares, task.elements), hops * task.nbytes, hops / 2 * task.nbytes
    ).times(hosts)
    inside = Counts(hops, hops * chunk, hops / 2 * chunk)
    total = rings + between.total.times(min(shares, task.elements))
    return Cost(between.between, inside, total, between.between + inside)
