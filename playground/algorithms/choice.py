"""`auto`: the algorithm by the size of the tensor and of the group."""

from __future__ import annotations

import torch

from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add, AllReduce
from playground.algorithms.ring import ring
from playground.algorithms.trees import halving_doubling, recursive_doubling

SMALL = 16 * 1024
"""Bytes up to which the number of steps decides."""
LARGE = 1024 * 1024
"""Bytes from which the pieces of the ring pay."""


def chosen(nbytes: int, size: int) -> AllReduce:
    """The algorithm for a tensor of `nbytes` in a group of `size`."""
    if nbytes <= SMALL:
        return recursive_doubling
    return ring if nbytes >= LARGE or size == 2 else halving_doubling


@AllReduce
def auto(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """The algorithm that is fastest for this size and group: it sends what the chosen one sends."""
    chosen(flat.numel() * flat.element_size(), messages.size).algorithm(flat, add, messages)
