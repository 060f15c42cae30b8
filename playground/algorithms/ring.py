"""The ring: all-reduce as a reduce-scatter, then an all-gather. Each is also a collective by itself.

The tensor is cut into N chunks, and each rank only ever sends to its right neighbour and receives from its left one.
With four ranks, these are the chunks that they send:

              reduce-scatter       all-gather
    step      1  2  3              0  1  2
    rank 0    3  2  1              0  3  2
    rank 1    0  3  2              1  0  3
    rank 2    1  0  3              2  1  0
    rank 3    2  1  0              3  2  1

Follow chunk 0 in the reduce-scatter: it leaves rank 1, every rank on its way adds its own to it, and it ends on rank 0
as the sum of all four. So do the others: each rank ends with the sum of the chunk that has its own number. In the
all-gather these sums go round once more, and every rank keeps what passes.
All links are busy in every step, and a rank sends 2 (N - 1) / N * S bytes: less than two tensors, however many ranks
there are. S is the size of the tensor in bytes, N that of the group.
Source: Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (2009)
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from playground.algorithms.cost_model import ELEMENT, Cost, Counts, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def ring(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """A reduce-scatter, after which rank r has the sum of chunk r, and an all-gather, after which all have all sums.

    | rank      | messages    | bytes               |
    |-----------|-------------|---------------------|
    | rank >= 0 | 2 * (N - 1) | 2 * (N - 1) / N * S |
    """
    reduce_scatter(flat, add, messages)
    all_gather(flat, messages)


def reduce_scatter(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """In step s = 1, …, N - 1, rank r sends chunk r - s to the right, receives chunk r - s - 1 and adds it to its own.

    All numbers are modulo N. From the second step on, it sends the chunk it has just added to. The last chunk to arrive
    is chunk r - N, which is chunk r.

    | rank      | messages | bytes           |
    |-----------|----------|-----------------|
    | rank >= 0 | N - 1    | (N - 1) / N * S |
    """
    messages.phase = "reduce-scatter"
    rank, size = messages.rank, messages.size
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = flat.tensor_split(size)
    arrived = flat.new_empty(chunks[0].shape)
    for step in range(1, size):
        outgoing, mine = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        theirs = arrived[: mine.numel()]
        messages.exchange(send=[(outgoing, right)], receive=[(theirs, left)])
        add(mine, theirs)


def all_gather(flat: torch.Tensor, messages: Messages) -> None:
    """In step s = 0, …, N - 2, rank r sends chunk r - s to the right, and receives and keeps chunk r - s - 1.

    All numbers are modulo N. It sends its own chunk first, then always the one that has just arrived.

    | rank      | messages | bytes           |
    |-----------|----------|-----------------|
    | rank >= 0 | N - 1    | (N - 1) / N * S |
    """
    messages.phase = "all-gather"
    rank, size = messages.rank, messages.size
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = flat.tensor_split(size)
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        messages.exchange(send=[(outgoing, right)], receive=[(incoming, left)])


def ring_cost(task: Task) -> Cost:
    """2 (N - 1) steps of a chunk; beyond one node, each step waits for the link between nodes.

    A chunk without elements is not sent.
    """
    hops, chunk = 2 * (task.size - 1), ceil(task.elements / task.size) * ELEMENT
    sent = min(task.size, task.elements)
    total = Counts(hops * sent, hops * task.nbytes, hops / 2 * task.nbytes)
    return Cost.along([(Counts(hops, hops * chunk, hops / 2 * chunk), task.one_node)], total)
