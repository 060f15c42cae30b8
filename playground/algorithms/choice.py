"""`auto`: the algorithm by the size of the tensor and of the group.

The limits were found by measuring on one host whose ranks share its cores, where what counts is the messages of all
together: there a tree beats recursive doubling, which wins where every rank has its own core. `scale` shows what a
cluster would choose.
"""

from __future__ import annotations

import torch

from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add, AllReduce
from playground.algorithms.ring import ring
from playground.algorithms.trees import binary_tree, halving_doubling, power_of_two, recursive_doubling

SMALL = 512 * 1024
"""Bytes up to which the number of messages decides."""
LARGE = 1024 * 1024
"""Bytes beyond which only the number of bytes does."""


def chosen(nbytes: int, size: int) -> AllReduce:
    """The algorithm for a tensor of `nbytes` in a group of `size`."""
    if nbytes <= SMALL:
        return recursive_doubling if size == 2 else binary_tree
    return halving_doubling if nbytes <= LARGE and size == power_of_two(size) else ring


@AllReduce
def auto(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """The algorithm that is fastest for this size and group: it sends what the chosen one sends."""
    chosen(flat.nbytes, messages.size).algorithm(flat, add, messages)
