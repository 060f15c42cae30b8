"""Our all-reduces: the ways to leave the same sum on every rank, from the first idea to the fast
ones. The lesson allreduce has those up to the ring, as a program that needs only torch.

    ring(tensor)                                              as dist.all_reduce(tensor)
    ring(tensor, dist.ReduceOp.MAX, group, async_op=True)     with any operation, group and tensor

A decorator, `AllReduce`, makes each of them such a function; what stands here sees a flat tensor.
`exchange` sends and receives, and waits for both; `add` adds in place, whatever adding is in the
operation. In docstrings, N is the size of the group, S that of the tensor in bytes, P the largest
power of two up to N, and E = N - P. Tables say what a rank sends; it receives as much as others
send it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import ceil
from typing import Any

import torch

from playground.algorithms import shared_memory as memory
from playground.algorithms.background import Work
from playground.algorithms.collectives import (
    AllReduce,
    all_gather_by,
    by_executor,
    reduce_scatter_by,
    run_collective,
)
from playground.algorithms.cost_model import IN_FLIGHT, RING_PIECE, distances, power_of_two
from playground.algorithms.executor import Addressed, Executor, Group, Subset, is_batched
from playground.algorithms.messages import add, exchange, hosts_of, segment_of, start
from playground.algorithms.operation import Op, check, kind
from playground.algorithms.segment import Segment


@AllReduce
def reduce_broadcast(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """All send to rank 0, which adds up and sends the sum back. The root's link carries everything.

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank == 0 | N - 1    | (N - 1) * S |
    | rank > 0  | 1        | S           |
    """
    if group.rank() > 0:
        exchange(group, send=[(tensor, 0)])
        exchange(group, receive=[(tensor, 0)])
        return
    arrived = torch.empty_like(tensor)
    for other in range(1, group.size()):
        exchange(group, receive=[(arrived, other)])
        add(tensor, arrived, op)
    exchange(group, send=[(tensor, other) for other in range(1, group.size())])


@AllReduce
def all_to_all(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Every rank sends everything to every other: one step, no root, but N(N-1) whole tensors on
    the wire.

    All add in the order of the ranks, so that the same sum, to the last bit, comes out everywhere.

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    others = [other for other in range(group.size()) if other != group.rank()]
    tensors = [tensor.clone() for _ in range(group.size())]  # this rank's, memory for the others'
    exchange(
        group,
        send=[(tensor, other) for other in others],
        receive=[(tensors[other], other) for other in others],
    )
    tensor.copy_(tensors[0])
    for theirs in tensors[1:]:
        add(tensor, theirs, op)


@AllReduce
def tutorial_ring(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Each passes on to the right what came from the left, whole, and adds it: neighbours only, but
    no fewer bytes.

    Each rank adds in an order of its own, so that sums of floating point numbers may differ between
    ranks in their last bits. Source:
    https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html#our-own-ring-allreduce

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    rank, size = group.rank(), group.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    outgoing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        exchange(group, send=[(outgoing, right)], receive=[(incoming, left)])
        add(tensor, incoming, op)
        outgoing, incoming = incoming, outgoing


@AllReduce
def ring(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """In N chunks: a reduce-scatter leaves the sum of chunk r on rank r, then an all-gather takes
    every sum to every rank. A rank sends less than two tensors, however many ranks there are.

    Each rank only ever sends to its right neighbour and receives from its left one, and all links
    are busy in every step. Source: Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for
    Clusters of Workstations (2009)

    | rank      | messages    | bytes               |
    |-----------|-------------|---------------------|
    | rank >= 0 | 2 * (N - 1) | 2 * (N - 1) / N * S |
    """
    reduce_scatter(tensor, op, group)
    all_gather(tensor, group)


def reduce_scatter(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """The ring's first phase: each chunk goes once round, and every rank adds its own to it. Rank r
    keeps the sum of chunk r.

    In step s = 1, …, N - 1, rank r sends chunk r - s to the right, receives chunk r - s - 1 and
    adds it to its own. All numbers are modulo N.

    | rank      | messages | bytes           |
    |-----------|----------|-----------------|
    | rank >= 0 | N - 1    | (N - 1) / N * S |
    """
    rank, size = group.rank(), group.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.tensor_split(size)
    arrived = torch.empty_like(chunks[0])  # the first chunk is the largest
    for step in range(1, size):
        outgoing = chunks[(rank - step) % size]
        mine = chunks[(rank - step - 1) % size]
        theirs = arrived[: len(mine)]
        exchange(group, send=[(outgoing, right)], receive=[(theirs, left)])
        add(mine, theirs, op)


def all_gather(tensor: torch.Tensor, group: Group) -> None:
    """The ring's second phase: rank r starts with chunk r, each chunk goes once round, and every
    rank keeps it.

    In step s = 0, …, N - 2, rank r sends chunk r - s to the right, and receives and keeps chunk
    r - s - 1.

    | rank      | messages | bytes           |
    |-----------|----------|-----------------|
    | rank >= 0 | N - 1    | (N - 1) / N * S |
    """
    rank, size = group.rank(), group.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.tensor_split(size)
    for step in range(size - 1):
        outgoing = chunks[(rank - step) % size]
        incoming = chunks[(rank - step - 1) % size]
        exchange(group, send=[(outgoing, right)], receive=[(incoming, left)])


def ring_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = Op.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """The first phase, called like `dist.reduce_scatter_tensor`: leave in `output`, on rank r of
    `group`, the r-th share of what `op` makes of all their `input`s.

    `input` has N times as many elements as `output`, and stays as it is. Raises `ValueError` for
    tensors that do not fit each other, and for an operation that is not defined for their type.
    """
    op = kind(op)
    check(input.dtype, op)

    def call(group: Group) -> None:
        reduce = by_executor(reduce_scatter, op, group)
        reduce_scatter_by(reduce, output, input, op, group.rank(), group.size())

    return run_collective(
        "reduce_scatter", call, input, output, group, async_op, shares=(input, output)
    )


def ring_all_gather(
    output: torch.Tensor, input: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """The second phase, called like `dist.all_gather_into_tensor`: leave in `output`, on every rank
    of `group`, the `input`s of all, in the order of the ranks.

    `output` has N times as many elements as `input`. Raises `ValueError` for tensors that do not
    fit each other.
    """

    def call(group: Group) -> None:
        all_gather_by(by_executor(all_gather, group), output, input, group.rank(), group.size())

    return run_collective(
        "all_gather", call, input, output, group, async_op, shares=(output, input)
    )


@AllReduce
def pipelined_ring(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """The ring, tuned: long chunks travel in pieces, and a piece goes on as soon as it is added. On
    tensors as short as these, the same messages as the ring's.

    In step s = 0, …, 2N - 3, rank r sends chunk r - s and receives chunk r - s - 1, in the first N
    - 1 steps to add it, then to keep it. A chunk travels in K pieces. Beside the tensor this needs
    memory for two pieces. Source: https://github.com/baidu-research/baidu-allreduce (2017)

    | rank      | messages        | bytes               |
    |-----------|-----------------|---------------------|
    | rank >= 0 | 2 * (N - 1) * K | 2 * (N - 1) / N * S |
    """
    rank, size = group.rank(), group.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    many = pieces_per_chunk(tensor, size)
    pieces = tensor.tensor_split(size * many)
    steps = [(rank - step - 1) % size * many for step in range(2 * (size - 1))]
    jobs = [piece for first in steps for piece in pieces[first : first + many]]
    adding, ahead = len(jobs) // 2, min(IN_FLIGHT, many)
    buffers = tensor.new_empty(ahead, len(pieces[0]))
    # Where each piece is received: what is to be added beside the tensor, what is to be kept in it.
    places = [
        buffers[job % ahead, : len(piece)] if job < adding else piece
        for job, piece in enumerate(jobs)
    ]
    # The first send is this rank's own chunk; after that, job j's piece, once done, is what job j +
    # many waits for.
    outgoing = [*pieces[rank * many : (rank + 1) * many], *jobs]
    under_way = []
    for job in range(many):
        receive: list[Addressed] = [(places[job], left)] if job < ahead else []
        under_way.append(start(group, send=[(outgoing[job], right)], receive=receive))
    receives = under_way[:ahead]
    for job, piece in enumerate(jobs):
        receives[job].received()
        if job < adding:
            add(piece, places[job], op)
        if job + ahead < len(jobs):
            send: list[Addressed] = (
                [(outgoing[job + many], right)] if job + many < len(jobs) else []
            )
            under_way.append(start(group, send, receive=[(places[job + ahead], left)]))
            receives.append(under_way[-1])
    for started in under_way:
        started.sent()


def pieces_per_chunk(tensor: torch.Tensor, size: int) -> int:
    """K: into how many pieces each chunk is cut."""
    chunk = ceil(len(tensor) / size)
    # the pieces of one batch must pair up on both sides, so as many are cut as are in flight
    if is_batched(tensor):
        return min(IN_FLIGHT, max(1, chunk))
    return max(1, ceil(chunk * tensor.element_size() / RING_PIECE))


@AllReduce
def recursive_doubling(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Swap whole tensors with a neighbour, then with one 2 away, then 4: few steps, for tensors so
    small that only steps count.

    | rank      | messages    | bytes             |
    |-----------|-------------|-------------------|
    | rank < E  | log2(P) + 1 | (log2(P) + 1) * S |
    | rank >= P | 1           | S                 |
    | rank >= E | log2(P)     | log2(P) * S       |
    """
    arrived = torch.empty_like(tensor)

    def double(power: int) -> None:
        for distance in distances(power):
            partner = group.rank() ^ distance
            exchange(group, send=[(tensor, partner)], receive=[(arrived, partner)])
            add(tensor, arrived, op)

    on_a_power_of_two(double, tensor, arrived, op, group)


@AllReduce
def halving_doubling(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Swap halves, then quarters, and add; then collect on the way back: the ring's bytes in fewer
    steps.

    | rank      | messages        | bytes                   |
    |-----------|-----------------|-------------------------|
    | rank < E  | 2 * log2(P) + 1 | 2 * (P - 1) / P * S + S |
    | rank >= P | 1               | S                       |
    | rank >= E | 2 * log2(P)     | 2 * (P - 1) / P * S     |
    """
    whole = group.size() == power_of_two(group.size())
    arrived = tensor.new_empty((len(tensor) + 1) // 2 if whole else len(tensor))

    def halve_and_double(power: int) -> None:
        mine, given_away = tensor, []
        for distance in reversed(distances(power)):
            partner = group.rank() ^ distance
            lower, upper = mine.tensor_split(2)
            mine, theirs = (lower, upper) if group.rank() < partner else (upper, lower)
            exchange(group, send=[(theirs, partner)], receive=[(arrived[: len(mine)], partner)])
            add(mine, arrived[: len(mine)], op)
            given_away.append((partner, mine, theirs))
        for partner, mine, theirs in reversed(given_away):
            exchange(group, send=[(mine, partner)], receive=[(theirs, partner)])

    on_a_power_of_two(halve_and_double, tensor, arrived, op, group)


def on_a_power_of_two(
    swap: Callable[[int], None], tensor: torch.Tensor, arrived: torch.Tensor, op: Any, group: Group
) -> None:
    """Call `swap(P)` on the first P ranks, since each needs a partner at every distance. The others
    hand their tensor to one of the first ranks, which receives it in `arrived`; they sit out, and
    get the result back.

    Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
    MPICH (2005)
    """
    rank, size, power = group.rank(), group.size(), power_of_two(group.size())
    if rank >= power:
        exchange(group, send=[(tensor, rank - power)])
        exchange(group, receive=[(tensor, rank - power)])
        return
    if rank + power < size:
        exchange(group, receive=[(arrived, rank + power)])
        add(tensor, arrived, op)
    swap(power)
    if rank + power < size:
        exchange(group, send=[(tensor, rank + power)])


@AllReduce
def binary_tree(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Sums go up a tree and the result comes down: no rank sends to more than three others, however
    many there are.

    Rank r has the children 2r + 1 and 2r + 2.

    | rank      | messages                                              | bytes                    |
    |-----------|-------------------------------------------------------|--------------------------|
    | rank >= 0 | (rank > 0) + (2 * rank + 1 < N) + (2 * rank + 2 < N)  | messages * S             |
    """
    rank, parent = group.rank(), (group.rank() - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < group.size()]
    arrived = [torch.empty_like(tensor) for _ in children]
    exchange(group, receive=[*zip(arrived, children, strict=True)])
    for theirs in arrived:
        add(tensor, theirs, op)
    if rank > 0:
        exchange(group, send=[(tensor, parent)])
        exchange(group, receive=[(tensor, parent)])
    exchange(group, send=[(tensor, child) for child in children])


INSIDE, BETWEEN = "inside hosts", "between hosts"


@AllReduce
def hierarchical(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """In two levels: sums of shares inside each host, of each share between hosts, then collected
    inside each host. Few bytes leave a host. On one host it is the ring; PLAYGROUND_HOSTS=2 in the
    environment shows it on two.

    With H hosts of L ranks each, all of which could also share memory: but so every step can be
    shown, and the cost follows from the links at both levels. K is the number of pieces in which
    the pipelined ring sends a chunk. Where hosts have different numbers of ranks, it is the
    pipelined ring. Source: Mikami et al.: Massively Distributed SGD: ImageNet/ResNet-50 Training in
    a Flash (2018), arXiv 1811.05233, where the two levels are the two directions of a torus

    | rank      | messages                      | bytes                                         |
    |-----------|-------------------------------|-----------------------------------------------|
    | rank >= 0 | 2 * (L - 1) + 2 * (H - 1) * K | 2 * (L - 1) / L * S + 2 * (H - 1) / H * S / L |
    """
    hosts = hosts_of(group, tensor.device)
    if len({*map(len, hosts)}) > 1:
        pipelined_ring.algorithm(tensor, op, group)
        return
    mine = next(host for host in hosts if group.rank() in host)
    place, inside = mine.index(group.rank()), Subset(group, mine, INSIDE)
    reduce_scatter(tensor, op, inside)
    if len(hosts) > 1:
        between = Subset(group, [host[place] for host in hosts], BETWEEN)
        pipelined_ring.algorithm(tensor.tensor_split(len(mine))[place], op, between)
    all_gather(tensor, inside)


SMALL = 512 * 1024
"""Bytes up to which the number of messages decides, on one host without memory that its ranks
share: the messages of all ranks together, which share its cores. There a tree beats recursive
doubling, which wins where every rank has its own core. This and the following limits were found by
measuring; `scale` shows what a cluster would choose."""
LARGE = 1024 * 1024
"""Bytes beyond which only the number of bytes does."""
SMALL_BETWEEN_HOSTS = 32 * 1024
"""Bytes up to which the number of messages decides where they go from host to host. Measured on two
hosts of two ranks with a link of 100 Mbit/s: at 16 KiB nothing is faster than recursive doubling,
at 64 KiB it takes twice as long as the hierarchical all-reduce."""


def choose(nbytes: int, size: int, hosts: int) -> AllReduce:
    """The algorithm for a tensor of `nbytes` in a group of `size` ranks on `hosts` hosts."""
    if hosts > 1 and nbytes <= SMALL_BETWEEN_HOSTS:
        return recursive_doubling
    if 1 < hosts < size:
        return hierarchical
    if nbytes <= SMALL:
        return recursive_doubling if size == 2 else binary_tree
    return halving_doubling if nbytes <= LARGE and size == power_of_two(size) else pipelined_ring


@AllReduce
def auto(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Memory that the ranks share, if they do; else the algorithm that is fastest for this size,
    group and hosts."""
    segment = segment_of(group, tensor.device)
    if isinstance(segment, Segment) and segment.size == group.size():
        memory.all_reduce(segment, tensor, op)
    else:
        hosts = len(hosts_of(group, tensor.device))
        choose(tensor.nbytes, group.size(), hosts).algorithm(tensor, op, group)


@AllReduce
def shared_memory(tensor: torch.Tensor, op: Any, group: Group) -> None:
    """Each rank copies its tensor into memory that all of them share, and all add: nothing is sent.
    The ranks that share none do as `auto` does, and say why, once."""
    segment = segment_of(group, tensor.device)
    hosts = hosts_of(group, tensor.device)
    if isinstance(segment, str):
        memory.say_why_not(segment, group.rank())
    elif len(hosts) > 1:
        memory.say_why_not("ranks are on several hosts", group.rank())
    auto.algorithm(tensor, op, group)


PHASES = {reduce_scatter.__code__: "reduce-scatter", all_gather.__code__: "all-gather"}
"""The names of phases, by the function that sends their messages."""


def current_phase(group: Group) -> str:
    """The phase of the algorithm that is starting messages of `group`, where phases have names: for
    an executor."""
    frame = sys._getframe(1)
    name = ""
    while frame.f_back and not name and frame.f_code is not Executor.run.__code__:
        name = PHASES.get(frame.f_code, "")
        frame = frame.f_back
    return f"{name or 'all-reduce'} {group.where}" if isinstance(group, Subset) else name
