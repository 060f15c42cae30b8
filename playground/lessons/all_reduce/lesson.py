"""All-reduce by hand: four ways to leave the same sum on every rank, and what each costs.

    torchrun --nproc-per-node 4 lesson.py
    python -m playground allreduce
    python -m playground allreduce --algorithm ring -n 3 --elements 6

Each way is a function of a flat tensor, which it replaces by the sum of all ranks' tensors. All
ranks call it with tensors of the same size. N is the number of ranks, S the size of the tensor in
bytes. The tables of formulas say what a rank sends; the pictures, which rank sends what to whom on
four ranks.

`allreduce` is the tutorial's function, with its arguments. Source:
https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html#our-own-ring-allreduce
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Messages = Sequence[tuple[Tensor, int]]
"""Tensors, each with the rank that it goes to or comes from."""


def exchange(send: Messages = (), receive: Messages = ()) -> None:
    """Start all of these messages together, then wait until all are done.

    Were each rank to wait for its send before it receives, all could wait for each other. A message
    without elements is left out: both ends know that it is empty.
    """
    batch = [dist.P2POp(dist.isend, tensor, rank) for tensor, rank in send if len(tensor)]
    batch += [dist.P2POp(dist.irecv, tensor, rank) for tensor, rank in receive if len(tensor)]
    if batch:
        for request in dist.batch_isend_irecv(batch):
            request.wait()


def reduce_broadcast(
    tensor: Tensor, rank: int, size: int, exchange: Any = exchange, add: Any = Tensor.add_
) -> None:
    """All send to rank 0, which adds up and sends the sum back. The root's link carries everything.

        step    1       2       3       4
                1 → 0   2 → 0   3 → 0   0 → 1, 2, 3

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank == 0 | N - 1    | (N - 1) * S |
    | rank > 0  | 1        | S           |
    """
    if rank > 0:
        exchange(send=[(tensor, 0)])
        exchange(receive=[(tensor, 0)])
        return
    arrived = torch.empty_like(tensor)
    for other in range(1, size):
        exchange(receive=[(arrived, other)])
        add(tensor, arrived)
    exchange(send=[(tensor, other) for other in range(1, size)])


def all_to_all(
    tensor: Tensor, rank: int, size: int, exchange: Any = exchange, add: Any = Tensor.add_
) -> None:
    """Every rank sends everything to every other: one step, no root, but N(N-1) whole tensors on
    the wire.

        step    1
                0 → 1, 2, 3   1 → 0, 2, 3   2 → 0, 1, 3   3 → 0, 1, 2

    All add in the order of the ranks, so that the same sum, to the last bit, comes out everywhere.

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    others = [other for other in range(size) if other != rank]
    tensors = [tensor.clone() for _ in range(size)]  # this rank's, and memory for the others'
    exchange(
        send=[(tensor, other) for other in others],
        receive=[(tensors[other], other) for other in others],
    )
    tensor.copy_(tensors[0])
    for theirs in tensors[1:]:
        add(tensor, theirs)


def tutorial_ring(
    tensor: Tensor, rank: int, size: int, exchange: Any = exchange, add: Any = Tensor.add_
) -> None:
    """Each passes on to the right what came from the left, whole, and adds it: neighbours only, but
    no fewer bytes.

        step    1, 2, 3
                0 → 1   1 → 2   2 → 3   3 → 0

    Each rank adds in an order of its own, so that sums of floating point numbers may differ between
    ranks in their last bits.

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    outgoing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        exchange(send=[(outgoing, right)], receive=[(incoming, left)])
        add(tensor, incoming)
        outgoing, incoming = incoming, outgoing


def ring(
    tensor: Tensor, rank: int, size: int, exchange: Any = exchange, add: Any = Tensor.add_
) -> None:
    """In N chunks: a reduce-scatter leaves the sum of chunk r on rank r, then an all-gather takes
    every sum to every rank. A rank sends less than two tensors, however many ranks there are.

    Each rank only ever sends to its right neighbour and receives from its left one, and all links
    are busy in every step. With four ranks, these are the chunks that they send:

                  reduce-scatter       all-gather
        step      1  2  3              0  1  2
        rank 0    3  2  1              0  3  2
        rank 1    0  3  2              1  0  3
        rank 2    1  0  3              2  1  0
        rank 3    2  1  0              3  2  1

    Source: Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations
    (2009)

    | rank      | messages    | bytes               |
    |-----------|-------------|---------------------|
    | rank >= 0 | 2 * (N - 1) | 2 * (N - 1) / N * S |
    """
    reduce_scatter(tensor, rank, size, exchange, add)
    all_gather(tensor, rank, size, exchange)


def reduce_scatter(
    tensor: Tensor, rank: int, size: int, exchange: Any = exchange, add: Any = Tensor.add_
) -> None:
    """The ring's first phase: each chunk goes once round, and every rank adds its own to it. Rank r
    keeps the sum of chunk r.

    In step s = 1, …, N - 1, rank r sends chunk r - s to the right, receives chunk r - s - 1 and
    adds it to its own. All numbers are modulo N. From the second step on, it sends the chunk it has
    just added to. The last chunk to arrive is chunk r - N, which is chunk r.

    | rank      | messages | bytes           |
    |-----------|----------|-----------------|
    | rank >= 0 | N - 1    | (N - 1) / N * S |
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.tensor_split(size)
    arrived = torch.empty_like(chunks[0])  # the first chunk is the largest
    for step in range(1, size):
        outgoing = chunks[(rank - step) % size]
        mine = chunks[(rank - step - 1) % size]
        theirs = arrived[: len(mine)]
        exchange(send=[(outgoing, right)], receive=[(theirs, left)])
        add(mine, theirs)


def all_gather(tensor: Tensor, rank: int, size: int, exchange: Any = exchange) -> None:
    """The ring's second phase: rank r starts with chunk r, each chunk goes once round, and every
    rank keeps it.

    In step s = 0, …, N - 2, rank r sends chunk r - s to the right, and receives and keeps chunk
    r - s - 1. It sends its own chunk first, then always the one that has just arrived.

    | rank      | messages | bytes           |
    |-----------|----------|-----------------|
    | rank >= 0 | N - 1    | (N - 1) / N * S |
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.tensor_split(size)
    for step in range(size - 1):
        outgoing = chunks[(rank - step) % size]
        incoming = chunks[(rank - step - 1) % size]
        exchange(send=[(outgoing, right)], receive=[(incoming, left)])


def allreduce(send: Tensor, recv: Tensor) -> None:
    """The tutorial's function, but right, and in chunks: leave in `recv`, on every rank, the sum of
    all `send`s. Any shape, the same on all ranks."""
    total = send.clone().flatten()
    ring(total, dist.get_rank(), dist.get_world_size())
    recv.copy_(total.view_as(recv))


def run_counted(way: Callable[..., None], tensor: Tensor, rank: int, size: int) -> list[int]:
    """Run a way. Returns the number of elements of each message that this rank sends."""
    sent: list[int] = []

    def counting(send: Messages = (), receive: Messages = ()) -> None:
        sent.extend(len(tensor) for tensor, _ in send)
        exchange(send, receive)

    way(tensor, rank, size, counting)
    return sent


def print_ways(rank: int, world_size: int) -> None:
    """Run every way on a tensor of N elements; print what it leaves on this rank, and what the rank
    sends. Rank r starts with 10 to the power r: each digit of a sum says whose tensor is in it."""
    for way in (reduce_broadcast, all_to_all, tutorial_ring, ring):
        tensor = torch.full((world_size,), 10 ** (rank % 16))  # which begins again after 16 ranks
        sent = run_counted(way, tensor, rank, world_size)
        print(f"Rank {rank}, {way.__name__}: {tensor.tolist()}, sends {sent} elements")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_ways(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
