"""The ring, tuned: chunks travel in pieces, and while one piece is added others are on their way."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from playground.algorithms.cost_model import ELEMENT, Cost, Counts, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add
    from playground.algorithms.transport import Started

PIECE = 768 * 1024
"""Bytes, at most, of one message between CPUs: what was received is then still in a core's cache when it is added, and
when it is sent on. Found by trying 64 KiB to 8 MiB."""
IN_FLIGHT = 2
"""Receives under way: while one piece is added, the next is on its way."""


def pipelined_ring(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """The ring's reduce-scatter and all-gather in one stream: a piece goes on to the right as soon as it is added.

    In step s = 0, …, 2N - 3, rank r sends chunk r - s and receives chunk r - s - 1, in the first N - 1 steps to add it,
    then to keep it. A chunk travels in K pieces. Beside the tensor this needs memory for two pieces.
    Source: https://github.com/baidu-research/baidu-allreduce (2017)

    | rank      | messages        | bytes               |
    |-----------|-----------------|---------------------|
    | rank >= 0 | 2 * (N - 1) * K | 2 * (N - 1) / N * S |
    """
    rank, size = messages.rank, messages.size
    left, right = (rank - 1) % size, (rank + 1) % size
    many = pieces_per_chunk(flat, size, messages.transport.batched)
    pieces = flat.tensor_split(size * many)
    steps = [(rank - step - 1) % size * many for step in range(2 * (size - 1))]
    jobs = [piece for first in steps for piece in pieces[first : first + many]]
    adding, ahead = len(jobs) // 2, min(IN_FLIGHT, many)
    buffers = flat.new_empty(ahead, pieces[0].numel())

    def place(job: int) -> torch.Tensor:
        """Where a piece is received: what is to be added beside the tensor, what is to be kept in it."""
        return buffers[job % ahead, : jobs[job].numel()] if job < adding else jobs[job]

    # The first send is this rank's own chunk; after that, job j's piece, once done, is what job j + many waits for.
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
    """K: into how many pieces each chunk is cut."""
    chunk = ceil(flat.numel() / size)
    if batched:  # the pieces of one batch must pair up on both sides, so as many are cut as are in flight
        return min(IN_FLIGHT, max(1, chunk))
    return max(1, ceil(chunk * flat.element_size() / PIECE))


def pipelined_ring_cost(task: Task) -> Cost:
    """2 (N - 1) steps of a chunk in K pieces; beyond one node, each step waits for the link between nodes.

    With two pieces or more, two are in flight: while one is added the next arrives, so that of all additions only that
    of one piece is on the path. A chunk without elements is not sent.
    """
    hops, chunk = 2 * (task.size - 1), ceil(task.elements / task.size) * ELEMENT
    pieces = min(IN_FLIGHT, chunk // ELEMENT) if task.batched else ceil(chunk / PIECE)
    added = chunk * hops / 2 if pieces == 1 else chunk / pieces
    sent = min(task.size * pieces, task.elements)
    total = Counts(hops * sent, hops * task.nbytes, hops / 2 * task.nbytes)
    return Cost.along([(Counts(hops * pieces, hops * chunk, added), task.one_node)], total)
