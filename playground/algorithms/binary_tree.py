"""All-reduce up and down a tree of ranks: rank r has the children 2r + 1 and 2r + 2."""

from __future__ import annotations

from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING

from playground.algorithms.cost_model import Cost, Counts, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def binary_tree(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Sums go up a tree whose rank r has the children 2r + 1 and 2r + 2; the result comes down it.

    | rank      | messages                                              | bytes                    |
    |-----------|-------------------------------------------------------|--------------------------|
    | rank >= 0 | (rank > 0) + (2 * rank + 1 < N) + (2 * rank + 2 < N)  | messages * S             |
    """
    rank, parent = messages.rank, (messages.rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < messages.size]
    arrived = {child: flat.new_empty(flat.shape) for child in children}
    messages.exchange(receive=[(arrived[child], child) for child in children])
    for child in children:
        add(flat, arrived[child])
    if rank > 0:
        messages.exchange(send=[(flat, parent)])
        messages.exchange(receive=[(flat, parent)])
    messages.exchange(send=[(flat, child) for child in children])


def binary_tree_cost(task: Task) -> Cost:
    """The sums go up level by level, and the result comes down; a parent's link serves its children in turn.

    Level k leads to the ranks 2^k - 1 ... 2^(k+1) - 2. Child and parent share a node only on the first one, so a
    level is inside where all its ranks are on that.
    """
    path = []
    for level, (messages, additions) in enumerate(critical_path(task.size), 1):
        inner = min(task.size, 2 ** (level + 1) - 1) <= task.node
        path.append((Counts(messages, messages * task.nbytes, additions * task.nbytes), inner))
    return Cost.along(path, Counts(2, 2 * task.nbytes, task.nbytes).times(task.size - 1))


def critical_path(size: int) -> list[tuple[int, int]]:
    """The critical path up and down again, level by level from the root: messages one after the other, additions."""
    levels = zip_longest(path_up(size), path_down(size), fillvalue=None)
    return [((up[0] if up else 0) + (down or 0), up[1] if up else 0) for up, down in levels]


def subtrees(size: int) -> tuple[int, int]:
    """How many ranks lie left and right below the root of a tree of `size` that is filled level by level."""
    lowest = 1 << (size.bit_length() - 1)
    left = lowest // 2 - 1 + min(size - lowest + 1, lowest // 2)
    return left, size - 1 - left


@cache
def path_up(size: int) -> tuple[tuple[int, int], ...]:
    """On the critical path up a tree, level by level from the root: messages that arrive in turn, and additions.

    The left subtree is never done sooner. If the right one is done at the same time, two messages arrive in turn; if
    it is done sooner, its message has already arrived.
    """
    if size == 1:
        return ()
    left, right = subtrees(size)
    below = path_up(left)
    tie = right > 0 and sum(messages for messages, _ in path_up(right)) == sum(messages for messages, _ in below)
    return ((1 + tie, 1 + (right > 0)), *below)


@cache
def path_down(size: int) -> tuple[int, ...]:
    """On the critical path down a tree, level by level: messages until the child on the path has its own."""
    if size == 1:
        return ()
    left, right = subtrees(size)
    ways = [(1, *path_down(left))] + ([(2, *path_down(right))] if right else [])
    return max(ways, key=lambda way: (sum(way), len(way)))
