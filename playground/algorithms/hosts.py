"""Which ranks of a group share a host: found out once per group, by exchanging what tells hosts apart.

Ranks of one host reach each other through its memory, ranks of two only through the link between these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from playground.runtime.host import host_id

if TYPE_CHECKING:
    import torch

    from playground.algorithms.transport import Transport

DIGEST_SIZE = 8
"""Bytes of the number that stands for a host."""


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


def exchange_hosts(transport: Transport, device: torch.device) -> Hosts:
    """Which ranks of the transport's group share a host. All of them must call this at the same point.

    Digests go once round a ring, as messages of the group like an algorithm's own: a collective of the backend could
    meet one that the user has started meanwhile. `device` is where the group's messages lie.
    """
    import torch

    rank, size = transport.rank, transport.size
    digest = hashlib.blake2b(host_id().encode(), digest_size=DIGEST_SIZE).digest()
    digests = torch.zeros(size, dtype=torch.int64, device=device)
    digests[rank] = int.from_bytes(digest, "little", signed=True)
    slots = digests.split(1)
    for step in range(size - 1):
        outgoing, incoming = slots[(rank - step) % size], slots[(rank - step - 1) % size]
        started = transport.start([(outgoing, (rank + 1) % size)], [(incoming, (rank - 1) % size)])
        started.received()
        started.sent()
    return Hosts.from_ids(digests.tolist())
