"""All-reduce by hand: the ways to leave the same sum on every rank, and what each costs.

    python -m playground allreduce
    python -m playground allreduce --algorithm ring -n 3 --elements 6
    python -m playground allreduce --algorithm reduce-scatter

Rank r starts with 10 to the power r in every element (with more than 16 ranks it begins again), so each digit of what a
rank holds says whose tensor is in it.
What is shown are the messages of the run itself, recorded as they are sent. The tables hold for as many ranks and
elements as they have rows: `messages` and `sent` are what a rank sends, `sent` in bytes, eight per element.
playground/algorithms/ has the same algorithms, one per file, for any operation, group and transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from playground.lessons.all_reduce import trace
from playground.lessons.all_reduce.page import Trace
from playground.lessons.all_reduce.trace import traced


def allreduce(send: torch.Tensor, recv: torch.Tensor) -> None:
    """The tutorial's function, but right, and in chunks: leave in `recv`, on every rank, the sum of all `send`s."""
    rank, size = dist.get_rank(), dist.get_world_size()
    recv.copy_(send)
    reduce_scatter(rank, size, recv)
    all_gather(rank, size, recv)


def isend(tensor: torch.Tensor, to: int) -> dist.P2POp:
    """A message to be sent, for `dist.batch_isend_irecv` to start."""
    return dist.P2POp(dist.isend, tensor, to)


def irecv(tensor: torch.Tensor, source: int) -> dist.P2POp:
    """A message to be received."""
    return dist.P2POp(dist.irecv, tensor, source)


def wait(works: Sequence[dist.Work]) -> None:
    """Wait until messages that were started together have been sent and received."""
    for work in works:
        work.wait()


@traced
def reduce_broadcast(rank: int, size: int, tensor: torch.Tensor) -> None:
    """All send to rank 0, which adds up and sends the sum back. The root's link carries everything.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 1        | 32   |
    """
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    elif size > 1:
        arrived = torch.empty_like(tensor)
        for other in range(1, size):
            dist.recv(arrived, other)
            tensor += arrived
        wait(dist.batch_isend_irecv([isend(tensor, other) for other in range(1, size)]))


@traced
def all_to_all(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Every rank sends everything to every other: one step, no root, but N(N-1) whole tensors on the wire.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 3        | 96   |
    """
    others = [other for other in range(size) if other != rank]
    arrived = [tensor.clone() for _ in range(size)]
    if others:
        receives = [irecv(arrived[other], other) for other in others]
        wait(dist.batch_isend_irecv([isend(tensor, other) for other in others] + receives))
    tensor.copy_(arrived[0])
    for theirs in arrived[1:]:  # in the order of the ranks, so that all get the same sum to the last bit
        tensor += theirs


@traced
def tutorial_ring(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Each passes on to the right what came from the left, whole, and adds it: neighbours only, but no fewer bytes.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 3        | 96   |
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    passed_on, arrived = tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        wait(dist.batch_isend_irecv([isend(passed_on, right), irecv(arrived, left)]))
        tensor += arrived
        passed_on, arrived = arrived, passed_on


@traced
def ring(rank: int, size: int, tensor: torch.Tensor) -> None:
    """In N chunks: a reduce-scatter leaves the sum of chunk r on rank r, then an all-gather takes every sum to every
    rank. A rank sends less than two tensors, however many ranks there are.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    allreduce(tensor.clone(), tensor)


@traced
def reduce_scatter(rank: int, size: int, tensor: torch.Tensor) -> None:
    """The ring's first phase by itself: each chunk goes once round and every rank adds its own to it. Rank r keeps the
    sum of chunk r.

    | rank | before                   | after  | messages | sent |
    |------|--------------------------|--------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111] | 3        | 24   |
    | 1    | [10, 10, 10, 10]         | [1111] | 3        | 24   |
    | 2    | [100, 100, 100, 100]     | [1111] | 3        | 24   |
    | 3    | [1000, 1000, 1000, 1000] | [1111] | 3        | 24   |
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.view(-1).tensor_split(size)
    arrived = torch.empty_like(chunks[0])
    for step in range(1, size):
        outgoing, mine = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        theirs = arrived[: len(mine)]
        wait(dist.batch_isend_irecv([isend(outgoing, right), irecv(theirs, left)]))
        mine += theirs


@traced
def all_gather(rank: int, size: int, tensor: torch.Tensor) -> None:
    """The ring's second phase by itself: rank r starts with chunk r, each chunk goes once round, and every rank keeps
    it.

    | rank | before | after              | messages | sent |
    |------|--------|--------------------|----------|------|
    | 0    | [1]    | [1, 10, 100, 1000] | 3        | 24   |
    | 1    | [10]   | [1, 10, 100, 1000] | 3        | 24   |
    | 2    | [100]  | [1, 10, 100, 1000] | 3        | 24   |
    | 3    | [1000] | [1, 10, 100, 1000] | 3        | 24   |
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.view(-1).tensor_split(size)
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        wait(dist.batch_isend_irecv([isend(outgoing, right), irecv(incoming, left)]))


def pipelined_ring(rank: int, size: int, elements: int | None = None) -> Trace:
    """The ring, tuned: long chunks travel in pieces, and a piece goes on as soon as it is added. On tensors as short as
    these, the same messages as the ring's.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    return trace.trace("pipelined-ring", rank, size, elements)  # playground/algorithms/pipelined_ring.py


@traced
def recursive_doubling(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Swap whole tensors with a neighbour, then with one 2 away, then 4: few steps, for tensors so small that only
    steps count.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 2        | 64   |
    """

    def double(power: int) -> None:
        arrived, distance = torch.empty_like(tensor), 1
        while distance < power:
            partner = rank ^ distance
            wait(dist.batch_isend_irecv([isend(tensor, partner), irecv(arrived, partner)]))
            tensor.add_(arrived)
            distance *= 2

    on_a_power_of_two(double, rank, size, tensor)


@traced
def halving_doubling(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Swap halves, then quarters, and add; then collect on the way back: the ring's bytes in fewer steps.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 4        | 48   |
    """

    def halve_and_double(power: int) -> None:
        mine, given_away, distance = tensor.view(-1), [], power // 2
        while distance:
            partner = rank ^ distance
            lower, upper = mine.tensor_split(2)
            mine, theirs = (lower, upper) if rank < partner else (upper, lower)
            arrived = torch.empty_like(mine)
            wait(dist.batch_isend_irecv([isend(theirs, partner), irecv(arrived, partner)]))
            mine += arrived
            given_away.append((partner, mine, theirs))
            distance //= 2
        for partner, mine, theirs in reversed(given_away):
            wait(dist.batch_isend_irecv([isend(mine, partner), irecv(theirs, partner)]))

    on_a_power_of_two(halve_and_double, rank, size, tensor)


def on_a_power_of_two(swap: Callable[[int], Any], rank: int, size: int, tensor: torch.Tensor) -> None:
    """Call `swap(P)` on the first P ranks, the largest power of two, since each needs a partner at every distance. The
    others hand their tensor to one of the first ranks, sit out, and get the result back."""
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        dist.send(tensor, rank - power)
        dist.recv(tensor, rank - power)
        return
    if rank + power < size:
        arrived = torch.empty_like(tensor)
        dist.recv(arrived, rank + power)
        tensor += arrived
    swap(power)
    if rank + power < size:
        dist.send(tensor, rank + power)


@traced
def binary_tree(rank: int, size: int, tensor: torch.Tensor) -> None:
    """Sums go up a tree and the result comes down: no rank sends to more than three others, however many there are.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 1        | 32   |
    """
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    arrived = [torch.empty_like(tensor) for _ in children]
    if children:
        wait(dist.batch_isend_irecv([*map(irecv, arrived, children)]))
    for theirs in arrived:
        tensor += theirs
    if rank > 0:
        dist.send(tensor, parent)
        dist.recv(tensor, parent)
    if children:
        wait(dist.batch_isend_irecv([isend(tensor, child) for child in children]))


def hierarchical(rank: int, size: int, elements: int | None = None) -> Trace:
    """In two levels: sums of shares inside each host, of each share between hosts, then collected inside each host. Few
    bytes leave a host. On one host it is the ring; PLAYGROUND_HOSTS=2 in the environment shows it on two.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    return trace.trace("hierarchical", rank, size, elements)  # playground/algorithms/hierarchical.py


run = trace.run  # what the command has every rank do: the algorithms it is asked for, one after the other


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("allreduce")
