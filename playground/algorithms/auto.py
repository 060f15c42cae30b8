"""`auto`: the memory that ranks of one host share, or the algorithm by the size of tensor and group, and by the hosts.

The limits were found by measuring. On one host without such memory, whose ranks share its cores, what counts is the
messages of all together: there a tree beats recursive doubling, which wins where every rank has its own core. On
several hosts what counts is what crosses the links between them: few messages for small tensors, few bytes for all
others. `scale` shows what a cluster would choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.binary_tree import binary_tree
from playground.algorithms.halving_doubling import halving_doubling
from playground.algorithms.hierarchical import hierarchical
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
SMALL_BETWEEN_HOSTS = 32 * 1024
"""Bytes up to which the number of messages decides where they go from host to host. Measured on two hosts of two ranks
with a link of 100 Mbit/s: at 16 KiB nothing is faster than recursive doubling, at 64 KiB it takes twice as long as the
hierarchical all-reduce."""


def choose(nbytes: int, size: int, hosts: int) -> ReducingAlgorithm:
    """The algorithm for a tensor of `nbytes` in a group of `size` ranks on `hosts` hosts."""
    if hosts > 1 and nbytes <= SMALL_BETWEEN_HOSTS:
        return recursive_doubling
    if 1 < hosts < size:
        return hierarchical
    if nbytes <= SMALL:
        return recursive_doubling if size == 2 else binary_tree
    return halving_doubling if nbytes <= LARGE and size == power_of_two(size) else pipelined_ring


def auto(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Memory that the ranks share, if they do; else the algorithm that is fastest for this size, group and hosts."""
    from playground.algorithms.shared_memory import share_memory  # with torch, which choosing does without

    if not share_memory(flat, messages):
        choose(flat.nbytes, messages.size, len(messages.hosts.members))(flat, add, messages)


def shared_memory(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Each rank copies its tensor into memory that all of them share, and all add: nothing is sent. The ranks that
    share none do as `auto` does, and say why, once."""
    from playground.algorithms.shared_memory import say_why_not

    segment = messages.segment
    excuse = segment if isinstance(segment, str) else "ranks are on several hosts" * messages.hosts.several
    if excuse:
        say_why_not(excuse, messages.rank)
    auto(flat, add, messages)
