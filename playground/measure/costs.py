"""Every algorithm of ours as messages, bytes and additions, for any number of ranks, bytes, and ranks a node.

S is the size of the tensor in bytes, N that of the group, P the largest power of two up to N, E = N - P. The totals are
exactly what is sent. Where the path depends on which of two messages goes first, it is the one that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from playground.measure import tree
from playground.measure.model import ELEMENT, Cost, Step, Task, Work

PIECE = 768 * 1024
"""Bytes, at most, that the ring sends in one message."""


def reduce_broadcast(task: Task) -> Cost:
    """Rank 0 receives from each of the others, one after the other, then sends to each: its link is the path.

    Of the others, the ranks of its own node are inside.
    """
    others, beside = task.size - 1, min(task.size, task.node) - 1
    both_ways = Work(2, 2 * task.nbytes, task.nbytes)
    path = [(both_ways.times(beside), True), (both_ways.times(others - beside), False)]
    return Cost.along(path, both_ways.times(others))


def all_to_all(task: Task) -> Cost:
    """Every link carries N - 1 messages in and out. The path is that of a rank on the last node, the least filled:
    most of its messages go between nodes. A rank also copies its own tensor aside, and the first one into place.
    """
    others = task.size - 1
    beside = others if task.one_node else others % task.node
    one, copies = Work(1, task.nbytes, task.nbytes), Work(added=2 * task.nbytes)
    path = [(one.times(beside), True), (one.times(others - beside) + copies, False)]
    return Cost.along(path, (one.times(others) + copies).times(task.size))


def tutorial_ring(task: Task) -> Cost:
    """N - 1 steps of a whole tensor, and one copy. Beyond one node, each step waits for the link between nodes."""
    rank = Work(1, task.nbytes, task.nbytes).times(task.size - 1) + Work(added=task.nbytes)
    return Cost.along([(rank, task.one_node)], rank.times(task.size))


def ring(task: Task) -> Cost:
    """2 (N - 1) steps of a chunk in K pieces; beyond one node, each step waits for the link between nodes.

    With two pieces or more, two are in flight: while one is added the next arrives, so that of all additions only that
    of one piece is on the path. A chunk without elements is not sent.
    """
    hops, chunk = 2 * (task.size - 1), ceil(task.elements / task.size) * ELEMENT
    pieces = ceil(chunk / PIECE)
    added = chunk * hops / 2 if pieces == 1 else chunk / pieces
    sent = min(task.size, task.elements) * pieces
    total = Work(hops * sent, hops * task.nbytes, hops / 2 * task.nbytes)
    return Cost.along([(Work(hops * pieces, hops * chunk, added), task.one_node)], total)


def recursive_doubling(task: Task) -> Cost:
    """log2 P swaps of the whole tensor; before and after, the last E ranks hand theirs in and get the result."""
    swap = Work(1, task.nbytes, task.nbytes)
    path = [(swap, near(task, distance)) for distance in distances(task)]
    return Cost.along([*path, *folding(task)], swap.times(task.power * len(path)) + folding_total(task))


def halving_doubling(task: Task) -> Cost:
    """The swap over distance d carries d / P of the tensor, once to add and once to collect.

    A part without elements is not sent: over distance d there are P / d parts, each sent by d ranks.
    """
    path = []
    messages = 0
    for distance in distances(task):
        part = task.nbytes * distance / task.power
        path.append((Work(2, 2 * part, part), near(task, distance)))
        messages += 2 * distance * min(task.power // distance, task.elements)
    moved = (task.power - 1) * task.nbytes
    return Cost.along([*path, *folding(task)], Work(messages, 2 * moved, moved) + folding_total(task))


def binary_tree(task: Task) -> Cost:
    """The sums go up level by level, and the result comes down; a parent's link serves its children in turn.

    Level k leads to the ranks 2^k - 1 ... 2^(k+1) - 2. Child and parent share a node only on the first one, so a
    level is inside where all its ranks are on that.
    """
    path = []
    for level, (messages, additions) in enumerate(tree.path(task.size), 1):
        inner = min(task.size, 2 ** (level + 1) - 1) <= task.node
        path.append((Work(messages, messages * task.nbytes, additions * task.nbytes), inner))
    return Cost.along(path, Work(2, 2 * task.nbytes, task.nbytes).times(task.size - 1))


def distances(task: Task) -> list[int]:
    """1, 2, 4, … P / 2: how far apart the ranks are that swap."""
    return [1 << step for step in range(task.power.bit_length() - 1)]


def near(task: Task, distance: int) -> bool:
    """Whether all who swap over `distance` do so inside nodes: blocks of 2 * distance ranks must not straddle two."""
    return task.power <= task.node or task.node % (2 * distance) == 0


def folding(task: Task) -> list[Step]:
    """The way in and out of the last E ranks, all at once."""
    return [(Work(2, 2 * task.nbytes, task.nbytes), task.one_node)] if task.extra else []


def folding_total(task: Task) -> Work:
    return Work(2, 2 * task.nbytes, task.nbytes).times(task.extra)


COSTS: dict[str, Callable[[Task], Cost]] = {
    "reduce-broadcast": reduce_broadcast,
    "all-to-all": all_to_all,
    "tutorial-ring": tutorial_ring,
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "binary-tree": binary_tree,
}
"""By the names of the algorithms."""
