"""The ring as tutorials have it: not cut into chunks, so that no byte is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.cost_model import Cost, Counts, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def tutorial_ring(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """N - 1 times, pass on to the right the whole tensor that came from the left, and add it.

    Each rank adds in an order of its own, so that sums of floating point numbers may differ between ranks in their
    last bits. As in https://pytorch.org/tutorials/intermediate/dist_tuto.html

    | rank      | messages | bytes       |
    |-----------|----------|-------------|
    | rank >= 0 | N - 1    | (N - 1) * S |
    """
    left, right = (messages.rank - 1) % messages.size, (messages.rank + 1) % messages.size
    passed_on, arrived = flat.clone(), flat.new_empty(flat.shape)
    for _ in range(messages.size - 1):
        messages.exchange(send=[(passed_on, right)], receive=[(arrived, left)])
        add(flat, arrived)
        passed_on, arrived = arrived, passed_on


def tutorial_ring_cost(task: Task) -> Cost:
    """N - 1 steps of a whole tensor, and one copy. Beyond one node, each step waits for the link between nodes."""
    rank = Counts(1, task.nbytes, task.nbytes).times(task.size - 1) + Counts(added=task.nbytes)
    return Cost.along([(rank, task.one_node)], rank.times(task.size))
