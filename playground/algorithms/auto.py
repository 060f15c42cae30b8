"""`auto`: the algorithm by the size of the tensor and of the group.

The limits were found by measuring on one host whose ranks share its cores, where what counts is the messages of all
together: there a tree beats recursive doubling, which wins where every rank has its own core. `scale` shows what a
cluster would choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.binary_tree import binary_tree
from playground.algorithms.halving_doubling import halving_doubling
from playground.algorithms.pipelined_ring import pipelined_ring
from playground.algorithms.power_of_two import power_of_two
from playground.algorithms.recursive_doubling import recursive_doubling

if TYPE_CHECKING:
    import torch

    from playground.algorithms.collectives import ReducingAlgorithm
    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add

SMALL = 512 * 1024
"""Bytes up to which the number of messages decides."""
LARGE = 1024 * 1024
"""Bytes beyond which only the number of bytes does."""


def choose(nbytes: int, size: int) -> ReducingAlgorithm:
    """The algorithm for a tensor of `nbytes` in a group of `size`."""
    if nbytes <= SMALL:
        return recursive_doubling if size == 2 else binary_tree
    return halving_doubling if nbytes <= LARGE and size == power_of_two(size) else pipelined_ring


def auto(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """The algorithm that is fastest for this size and group: it sends what the chosen one sends."""
    choose(flat.nbytes, messages.size)(flat, add, messages)
