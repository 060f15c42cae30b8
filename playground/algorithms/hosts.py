"""Which ranks of a group share a host.

Ranks of one host reach each other through its memory, ranks of two only through the link between these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group by host."""

    members: tuple[tuple[int, ...], ...]
    """For each host its ranks, in order; the hosts are in the order of their first ranks."""

    @staticmethod
    def from_ids(ids: Sequence[object]) -> Hosts:
        """From what every rank says of its host, in rank order."""
        by_id: dict[object, list[int]] = {}
        for rank, host in enumerate(ids):
            by_id.setdefault(host, []).append(rank)
        return Hosts(tuple(map(tuple, by_id.values())))

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks on this rank's host, itself among them."""
        return self._by_rank[rank]

    @cached_property
    def smallest(self) -> int:
        """Number of ranks on the host that has the fewest."""
        return min(map(len, self.members))

    @property
    def several(self) -> bool:
        """Whether there is more than one host."""
        return len(self.members) > 1

    @cached_property
    def _by_rank(self) -> dict[int, tuple[int, ...]]:
        return {rank: host for host in self.members for rank in host}
