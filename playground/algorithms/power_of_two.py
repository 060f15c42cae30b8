"""Shared by recursive doubling and halving: a partner at every distance needs a power of two of ranks.

P is the largest power of two up to N, E = N - P. Where N is no power of two, the last E ranks hand their tensor to one
of the first E, sit out, and get the result back.
Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playground.algorithms.cost_model import Counts, Step, Task

if TYPE_CHECKING:
    import torch

    from playground.algorithms.messages import Messages
    from playground.algorithms.operation import Add


def power_of_two(size: int) -> int:
    """P: the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def fold_in(flat: torch.Tensor, arrived: torch.Tensor, add: Add, messages: Messages) -> bool:
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


def distances(task: Task) -> list[int]:
    """1, 2, 4, … P / 2: how far apart the ranks are that swap."""
    return [1 << step for step in range(task.power.bit_length() - 1)]


def is_near(task: Task, distance: int) -> bool:
    """Whether all who swap over `distance` do so inside nodes: blocks of 2 * distance ranks must not straddle two."""
    return task.power <= task.node or task.node % (2 * distance) == 0


def folding(task: Task) -> list[Step]:
    """The way in and out of the last E ranks, all at once."""
    return [(Counts(2, 2 * task.nbytes, task.nbytes), task.one_node)] if task.extra else []


def folding_total(task: Task) -> Counts:
    """The same, of all ranks together."""
    return Counts(2, 2 * task.nbytes, task.nbytes).times(task.extra)
