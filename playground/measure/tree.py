"""The shape of a tree of ranks that is filled level by level, and the longest way of a message through it.

A parent's link carries one message at a time, so its two children are served in turn.
"""

from __future__ import annotations

from functools import cache
from itertools import zip_longest


def path(size: int) -> list[tuple[int, int]]:
    """The critical path up and down again, level by level from the root: messages one after the other, additions."""
    levels = zip_longest(upward(size), downward(size), fillvalue=None)
    return [((up[0] if up else 0) + (down or 0), up[1] if up else 0) for up, down in levels]


def subtrees(size: int) -> tuple[int, int]:
    """How many ranks lie left and right below the root of a tree of `size` that is filled level by level."""
    lowest = 1 << (size.bit_length() - 1)
    left = lowest // 2 - 1 + min(size - lowest + 1, lowest // 2)
    return left, size - 1 - left


@cache
def upward(size: int) -> tuple[tuple[int, int], ...]:
    """On the critical path up a tree, level by level from the root: messages that arrive in turn, and additions.

    The left subtree is never done sooner. If the right one is done at the same time, two messages arrive in turn; if
    it is done sooner, its message has already arrived.
    """
    if size == 1:
        return ()
    left, right = subtrees(size)
    below = upward(left)
    tie = right > 0 and sum(messages for messages, _ in upward(right)) == sum(messages for messages, _ in below)
    return ((1 + tie, 1 + (right > 0)), *below)


@cache
def downward(size: int) -> tuple[int, ...]:
    """On the critical path down a tree, level by level: messages until the child on the path has its own."""
    if size == 1:
        return ()
    left, right = subtrees(size)
    ways = [(1, *downward(left))] + ([(2, *downward(right))] if right else [])
    return max(ways, key=lambda way: (sum(way), len(way)))
