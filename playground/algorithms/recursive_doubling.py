"""All-reduce in the fewest steps: what matters where a message costs more than its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.cost_model import Cost, Counts, Task
from playground.algorithms.power_of_two import (
    distances,
    fold_in,
    folding,
    folding_total,
    hand_back,
    is_near,
    power_of_two,
)

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def recursive_doubling(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Swap whole tensors with the rank 1 away, then 2, 4, …: each time the number of tensors in the sum doubles.

    | rank      | messages    | bytes             |
    |-----------|-------------|-------------------|
    | rank < E  | log2(P) + 1 | (log2(P) + 1) * S |
    | rank >= P | 1           | S                 |
    | rank >= E | log2(P)     | log2(P) * S       |
    """
    arrived = flat.new_empty(flat.shape)
    if not fold_in(flat, arrived, add, messages):
        return
    distance = 1
    while distance < power_of_two(messages.size):
        partner = messages.rank ^ distance
        messages.exchange(send=[(flat, partner)], receive=[(arrived, partner)])
        add(flat, arrived)
        distance *= 2
    hand_back(flat, messages)


def recursive_doubling_cost(task: Task) -> Cost:
    """log2 P swaps of the whole tensor; before and after, the last E ranks hand theirs in and get the result."""
    swap = Counts(1, task.nbytes, task.nbytes)
    path = [(swap, is_near(task, distance)) for distance in distances(task)]
    return Cost.along([*path, *folding(task)], swap.times(task.power * len(path)) + folding_total(task))
