"""All-reduce round a ring: each rank only ever sends to its right neighbour and receives from its left.

S is the size of the tensor in bytes, N that of the group. The tables say what a rank sends.
"""

from __future__ import annotations

import math

import torch

from playground.algorithms.messages import Messages, Started
from playground.algorithms.operation import Add, AllReduce

PIECE = 768 * 1024
"""Bytes, at most, of one message between CPUs: what was received is then still in a core's cache when it is added, and
when it is sent on. Found by trying 64 KiB to 8 MiB."""
IN_FLIGHT = 2
"""Receives under way: while one piece is added, the next is on its way."""


@AllReduce
def tutorial_ring(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """N - 1 times, pass on to the right the whole tensor that came from the left, and add it.

    Each rank adds in an order of its own, so that sums of floating point numbers may differ between ranks in their
    last bits. As in https://pytorch.org/tutorials/intermediate/dist_tuto.html

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    left, right = (messages.rank - 1) % messages.size, (messages.rank + 1) % messages.size
    passed_on, arrived = flat.clone(), torch.empty_like(flat)
    for _ in range(messages.size - 1):
        messages.exchange(send=[(passed_on, right)], receive=[(arrived, left)])
        add(flat, arrived)
        passed_on, arrived = arrived, passed_on


@AllReduce
def ring(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """The tensor in N chunks: N - 1 steps after which each rank has one chunk's sum, N - 1 that pass the sums round.

    In step s, rank r sends chunk r - s and receives chunk r - s - 1, first to add it, then to keep it. A chunk travels
    in K pieces, and a piece goes on to the right as soon as it is added: while one is added, others are on their way.
    Beside the tensor this needs memory for two pieces.
    Source: https://github.com/baidu-research/baidu-allreduce (2017)

    | rank      | messages        | bytes               |
    |-----------|-----------------|---------------------|
    | rank >= 0 | 2 * (N - 1) * K | 2 * (N - 1) / N * S |
    """
    rank, size = messages.rank, messages.size
    left, right = (rank - 1) % size, (rank + 1) % size
    many = pieces_per_chunk(flat, size, messages.batched)
    pieces = flat.tensor_split(size * many)
    steps = [(rank - step - 1) % size * many for step in range(2 * (size - 1))]
    jobs = [piece for first in steps for piece in pieces[first : first + many]]
    adding, ahead = len(jobs) // 2, min(IN_FLIGHT, many)
    room = flat.new_empty(ahead, pieces[0].numel())

    def place(job: int) -> torch.Tensor:
        """Where a piece is received: what is to be added beside the tensor, what is to be kept in it."""
        return room[job % ahead, : jobs[job].numel()] if job < adding else jobs[job]

    # What is sent first is this rank's own chunk; after that, job j's piece, once done, is what job j + many waits for.
    outgoing = [*pieces[rank * many : (rank + 1) * many], *jobs]
    under_way: list[Started] = []
    for job in range(many):
        receive = [(place(job), left)] if job < ahead else []
        under_way.append(messages.start(send=[(outgoing[job], right)], receive=receive))
    receives = under_way[:ahead]
    for job, piece in enumerate(jobs):
        receives[job].received()
        if job < adding:
            add(piece, place(job))
        if job + ahead < len(jobs):
            send = [(outgoing[job + many], right)] if job + many < len(jobs) else []
            under_way.append(messages.start(send, receive=[(place(job + ahead), left)]))
            receives.append(under_way[-1])
    for started in under_way:
        started.sent()


def pieces_per_chunk(flat: torch.Tensor, size: int, batched: bool) -> int:
    """K: into how many pieces the ring cuts each of its chunks."""
    chunk = math.ceil(flat.numel() / size)
    if batched:  # the pieces of one batch must pair up on both sides, so as many are cut as are in flight
        return min(IN_FLIGHT, max(1, chunk))
    return max(1, math.ceil(chunk * flat.element_size() / PIECE))
