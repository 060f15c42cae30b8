"""Finer control of whom to talk to: gradients are added up inside groups of ranks first, then between the groups.

Where ranks of a group are close to each other (on one host) and groups are far apart, one message of each group crosses
the slow links instead of one of every rank.
Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, arXiv 1706.02677, section 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from playground.training.gradients import AllReduce, average_gradients_flat
from playground.training.sync import AverageAfterBackward, Broadcast

GROUP_SIZE = 2
"""Ranks of a group; the last group has those that are left."""


class HierarchicalAverage(AverageAfterBackward):
    """All gradients in one message, added up inside each group, between their leaders, and handed on inside again."""

    def __init__(
        self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce, broadcast: Broadcast = dist.broadcast
    ) -> None:
        super().__init__(average_gradients_flat, model, all_reduce=HierarchicalAllReduce(all_reduce, broadcast))


class HierarchicalAllReduce:
    """An all-reduce made of smaller ones, for any number of ranks: what groups exchange are sums, so that groups of
    different sizes weigh what they should. All ranks get the same bits: those of their leaders."""

    def __init__(self, all_reduce: AllReduce = dist.all_reduce, broadcast: Broadcast = dist.broadcast) -> None:
        self.all_reduce, self.broadcast, self.groups = all_reduce, broadcast, groups_of(dist.group.WORLD)

    def __call__(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        groups = self.groups
        self.all_reduce(tensor, op=op, group=groups.mine)
        if dist.get_rank() == groups.leader:
            self.all_reduce(tensor, op=op, group=groups.leaders)
        self.broadcast(tensor, src=groups.leader, group=groups.mine)


@dataclass(frozen=True)
class Groups:
    """A rank's place in two levels of process groups."""

    mine: dist.ProcessGroup
    leader: int
    """The first rank of `mine`."""
    leaders: dist.ProcessGroup
    """The leaders of all groups."""


def make_groups(group_size: int = GROUP_SIZE) -> Groups:
    """Groups of consecutive ranks. Every rank makes all of them in the same order, as `new_group` demands."""
    size = dist.get_world_size()
    firsts = range(0, size, group_size)
    groups = {first: dist.new_group(list(range(first, min(first + group_size, size)))) for first in firsts}
    leader = dist.get_rank() // group_size * group_size
    return Groups(mine=groups[leader], leader=leader, leaders=dist.new_group(list(firsts)))


_groups: WeakKeyDictionary[Any, Groups] = WeakKeyDictionary()


def groups_of(world: Any) -> Groups:
    """The groups of this world, made at the first call: each has connections of its own."""
    if world not in _groups:
        _groups[world] = make_groups()
    return _groups[world]
