"""All-reduce as one thinks of it first: everything through one rank, or everything to everybody.

S is the size of the tensor in bytes, N that of the group. The tables say what a rank sends; it receives as much as
others send it. Every message is built from isend and irecv.
"""

from __future__ import annotations

import torch

from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add, AllReduce


@AllReduce
def reduce_broadcast(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """All send to rank 0, which adds up and sends back: its link carries 2(N - 1)·S, and the others wait for it.

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank == 0 | N - 1    | (N - 1) * S |
    | rank > 0  | 1        | S           |
    """
    if messages.rank > 0:
        messages.exchange(send=[(flat, 0)])
        messages.exchange(receive=[(flat, 0)])
        return
    others = range(1, messages.size)
    arrived = torch.empty_like(flat)
    for rank in others:
        messages.exchange(receive=[(arrived, rank)])
        add(flat, arrived)
    messages.exchange(send=[(flat, rank) for rank in others])


@AllReduce
def all_to_all(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Everybody sends the whole tensor to everybody and adds up what arrives: N(N - 1)·S in all.

    All add in the order of the ranks, so that the same sum, to the last bit, comes out everywhere.

    | rank     | messages | bytes       |
    |----------|----------|-------------|
    | rank >= 0 | N - 1   | (N - 1) * S |
    """
    others = [rank for rank in range(messages.size) if rank != messages.rank]
    arrived = {rank: torch.empty_like(flat) for rank in others}
    messages.exchange(send=[(flat, rank) for rank in others], receive=[(arrived[rank], rank) for rank in others])
    arrived[messages.rank] = flat.clone()
    flat.copy_(arrived[0])
    for rank in range(1, messages.size):
        add(flat, arrived[rank])
