"""All-reduce as a reduce-scatter by recursive halving and an all-gather by recursive doubling.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005), where it is
Rabenseifner's algorithm
"""

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


def halving_doubling(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Swap halves with a far rank, then quarters with a nearer one, …, add; then the same way back, to collect.

    As few bytes as the ring, in about as few steps as recursive doubling.

    | rank      | messages        | bytes                   |
    |-----------|-----------------|-------------------------|
    | rank < E  | 2 * log2(P) + 1 | 2 * (P - 1) / P * S + S |
    | rank >= P | 1               | S                       |
    | rank >= E | 2 * log2(P)     | 2 * (P - 1) / P * S     |
    """
    whole = messages.size == power_of_two(messages.size)
    arrived = flat.new_empty((flat.numel() + 1) // 2 if whole else flat.numel())
    if not fold_in(flat, arrived, add, messages):
        return
    mine, given_away = flat, []
    distance = power_of_two(messages.size) // 2
    while distance:
        partner = messages.rank ^ distance
        lower, upper = mine.tensor_split(2)
        mine, theirs = (lower, upper) if messages.rank < partner else (upper, lower)
        received = arrived[: mine.numel()]
        messages.exchange(send=[(theirs, partner)], receive=[(received, partner)])
        add(mine, received)
        given_away.append((partner, mine, theirs))
        distance //= 2
    for partner, mine, theirs in reversed(given_away):
        messages.exchange(send=[(mine, partner)], receive=[(theirs, partner)])
    hand_back(flat, messages)


def halving_doubling_cost(task: Task) -> Cost:
    """The swap over distance d carries d / P of the tensor, once to add and once to collect.

    A part without elements is not sent: over distance d there are P / d parts, each sent by d ranks.
    """
    path = []
    messages = 0
    for distance in distances(task):
        part = task.nbytes * distance / task.power
        path.append((Counts(2, 2 * part, part), is_near(task, distance)))
        messages += 2 * distance * min(task.power // distance, task.elements)
    moved = (task.power - 1) * task.nbytes
    return Cost.along([*path, *folding(task)], Counts(messages, 2 * moved, moved) + folding_total(task))
