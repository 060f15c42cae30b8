"""All-reduce as one thinks of it first: everything goes through one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.cost_model import Cost, Counts, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def reduce_broadcast(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """All send to rank 0, which adds up and sends back: its link carries 2 (N - 1) * S, and the others wait for it.

    S is the size of the tensor in bytes, N that of the group. The tables say what a rank sends; it receives as much as
    others send it.

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
    arrived = flat.new_empty(flat.shape)
    for rank in others:
        messages.exchange(receive=[(arrived, rank)])
        add(flat, arrived)
    messages.exchange(send=[(flat, rank) for rank in others])


def reduce_broadcast_cost(task: Task) -> Cost:
    """Rank 0 receives from each of the others, one after the other, then sends to each: its link is the path.

    Of the others, the ranks of its own node are inside.
    """
    others, beside = task.size - 1, min(task.size, task.node) - 1
    both_ways = Counts(2, 2 * task.nbytes, task.nbytes)
    path = [(both_ways.times(beside), True), (both_ways.times(others - beside), False)]
    return Cost.along(path, both_ways.times(others))
