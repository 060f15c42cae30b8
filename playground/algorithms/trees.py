"""All-reduce in few steps: what matters where a message costs more than its bytes.

S is the size of the tensor in bytes, N that of the group, P the largest power of two up to N, E = N - P. Where N is no
power of two, the last E ranks hand their tensor to one of the first E, sit out, and get the result back.
Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005)
"""

from __future__ import annotations

import torch

from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add, AllReduce


@AllReduce
def recursive_doubling(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Swap whole tensors with the rank 1 away, then 2, 4, …: each time the number of tensors in the sum doubles.

    | rank      | messages    | bytes             |
    |-----------|-------------|-------------------|
    | rank < E  | log2(P) + 1 | (log2(P) + 1) * S |
    | rank >= P | 1           | S                 |
    | rank >= E | log2(P)     | log2(P) * S       |
    """
    arrived = torch.empty_like(flat)
    if not folded_in(flat, arrived, add, messages):
        return
    distance = 1
    while distance < power_of_two(messages.size):
        partner = messages.rank ^ distance
        messages.exchange(send=[(flat, partner)], receive=[(arrived, partner)])
        add(flat, arrived)
        distance *= 2
    hand_back(flat, messages)


@AllReduce
def halving_doubling(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Swap halves with a far rank, then quarters with a nearer one, …, add; then the same way back, to collect.

    As few bytes as the ring, in as few steps as recursive doubling.

    | rank      | messages        | bytes                   |
    |-----------|-----------------|-------------------------|
    | rank < E  | 2 * log2(P) + 1 | 2 * (P - 1) / P * S + S |
    | rank >= P | 1               | S                       |
    | rank >= E | 2 * log2(P)     | 2 * (P - 1) / P * S     |
    """
    whole = messages.size == power_of_two(messages.size)
    arrived = flat.new_empty((flat.numel() + 1) // 2 if whole else flat.numel())
    if not folded_in(flat, arrived, add, messages):
        return
    mine, given_away = flat, []
    distance = power_of_two(messages.size) // 2
    while distance:
        partner = messages.rank ^ distance
        lower, upper = mine.tensor_split(2)
        mine, theirs = (lower, upper) if messages.rank < partner else (upper, lower)
        room = arrived[: mine.numel()]
        messages.exchange(send=[(theirs, partner)], receive=[(room, partner)])
        add(mine, room)
        given_away.append((partner, mine, theirs))
        distance //= 2
    for partner, mine, theirs in reversed(given_away):
        messages.exchange(send=[(mine, partner)], receive=[(theirs, partner)])
    hand_back(flat, messages)


@AllReduce
def binary_tree(flat: torch.Tensor, add: Add, messages: Messages) -> None:
    """Sums go up a tree whose rank r has the children 2r + 1 and 2r + 2; the result comes down it.

    | rank      | messages                                              | bytes                    |
    |-----------|-------------------------------------------------------|--------------------------|
    | rank >= 0 | (rank > 0) + (2 * rank + 1 < N) + (2 * rank + 2 < N)  | messages * S             |
    """
    rank, parent = messages.rank, (messages.rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < messages.size]
    arrived = {child: torch.empty_like(flat) for child in children}
    messages.exchange(receive=[(arrived[child], child) for child in children])
    for child in children:
        add(flat, arrived[child])
    if rank > 0:
        messages.exchange(send=[(flat, parent)])
        messages.exchange(receive=[(flat, parent)])
    messages.exchange(send=[(flat, child) for child in children])


def power_of_two(size: int) -> int:
    """P: the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def folded_in(flat: torch.Tensor, arrived: torch.Tensor, add: Add, messages: Messages) -> bool:
    """Bring the number of ranks down to a power of two. False on a rank that sat out and now has the result."""
    power, rank = power_of_two(messages.size), messages.rank
    if rank >= power:
        messages.exchange(send=[(flat, rank - power)])
        messages.exchange(receive=[(flat, rank - power)])
        return False
    if rank + power < messages.size:
        messages.exchange(receive=[(arrived, rank + power)])
        add(flat, arrived)
    return True


def hand_back(flat: torch.Tensor, messages: Messages) -> None:
    """Send the result to the rank that sat out for this one, if there is one."""
    stand_in_for = messages.rank + power_of_two(messages.size)
    if stand_in_for < messages.size:
        messages.exchange(send=[(flat, stand_in_for)])
