"""All-reduce in one step: everybody sends everything to everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.cost_model import Cost, Counts, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def all_to_all(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Everybody sends the whole tensor to everybody and adds up what arrives: N (N - 1) * S bytes in all.

    All add in the order of the ranks, so that the same sum, to the last bit, comes out everywhere.

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    others = [rank for rank in range(messages.size) if rank != messages.rank]
    arrived = {rank: flat.new_empty(flat.shape) for rank in others}
    messages.exchange(send=[(flat, rank) for rank in others], receive=[(arrived[rank], rank) for rank in others])
    arrived[messages.rank] = flat.clone()
    flat.copy_(arrived[0])
    for rank in range(1, messages.size):
        add(flat, arrived[rank])


def all_to_all_cost(task: Task) -> Cost:
    """Every link carries N - 1 messages in and out. The path is that of a rank on the last node, the least filled:
    most of its messages go between nodes. A rank also copies its own tensor aside, and the first one into place.
    """
    others = task.size - 1
    beside = others if task.one_node else others % task.node
    one, copies = Counts(1, task.nbytes, task.nbytes), Counts(added=2 * task.nbytes)
    path = [(one.times(beside), True), (one.times(others - beside) + copies, False)]
    return Cost.along(path, (one.times(others) + copies).times(task.size))
