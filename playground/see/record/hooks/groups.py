"""The ranks of process groups, and the numbers of the messages between them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

Ranks = tuple[int, ...]
Counts = defaultdict[tuple[str, int], Iterator[int]]
"""The numbers of the messages to come: by kind, and by the rank that they go to or come from. Both ends count alike."""


class Groups:
    """Of one recording."""

    def __init__(self) -> None:
        self.ranks: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
        self.counts: defaultdict[tuple[Ranks, int], Counts] = defaultdict(lambda: defaultdict(itertools.count))
        """By group and tag."""

    def ranks_of(self, group: Any) -> Ranks:
        """Its ranks as numbers of the world, in the group's order. None is the whole world."""
        group = group or dist.group.WORLD
        ranks = self.ranks.get(group)
        if ranks is None:
            ranks = self.ranks[group] = tuple(dist.get_process_group_ranks(group))
        return ranks

    def next_message(self, kind: str, peer: int, ranks: Ranks, tag: int) -> int:
        """The number of the next message of that kind to or from `peer`."""
        return next(self.counts[ranks, tag][kind, peer])
