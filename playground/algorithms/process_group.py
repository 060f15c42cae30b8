"""The transport that every backend of torch.distributed has: point-to-point messages of the process group.

These are `dist.isend` and `dist.irecv`, called on the group itself: the checks that torch's functions repeat at every
message would be a tenth of the time of a ring. nccl wants the messages of one step started together, in a batch.
Source: https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
import torch.distributed as dist

from playground.algorithms.hosts import Hosts
from playground.algorithms.transport import Addressed, Transport
from playground.runtime.backends import Backend, backend_of
from playground.runtime.host import digest, host_id
from playground.runtime.shared_memory import Segment, open_segment

TAG = 2017
"""Tag of our messages: none is taken for a message of the user's between the same two ranks."""
_backends: WeakKeyDictionary[Any, Backend] = WeakKeyDictionary()
"""Backends of the groups seen so far: asking torch would take a microsecond at every collective."""
_hosts: WeakKeyDictionary[Any, Hosts] = WeakKeyDictionary()
"""Hosts by rank, for groups whose ranks have exchanged them."""
_segments: WeakKeyDictionary[Any, Segment | str] = WeakKeyDictionary()
"""The memory that this rank shares with others of the group, or why there is none."""


class Works:
    """Messages under way, as torch's `Work` objects."""

    def __init__(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        self.sends, self.receives = sends, receives

    def received(self) -> None:
        for work in self.receives:
            work.wait()

    def sent(self) -> None:
        for work in self.sends:
            work.wait()


class ProcessGroupTransport:
    """The `Transport` over a process group's own `send` and `recv`."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        backend = _backends.get(group)
        if backend is None:
            backend = _backends[group] = backend_of(group)
        self.batched, self.allows_threads = backend.batches_messages, backend.allows_threads

    def start(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        if self.batched:
            return self._start_batch(send, receive)
        sends = [self.group.send([tensor], rank, TAG) for tensor, rank in send]
        return Works(sends, [self.group.recv([tensor], rank, TAG) for tensor, rank in receive])

    def hosts(self, device: torch.device) -> Hosts:
        hosts = _hosts.get(self.group)
        if hosts is None:
            hosts = _hosts[self.group] = exchange_hosts(self, device)
        return hosts

    def segment(self, device: torch.device) -> Segment | str:
        segment = _segments.get(self.group)
        if segment is None:
            hosts, timeout = self.hosts(device).members, partial(timeout_of, proxy(self.group), device)
            if device.type == "cpu":
                world = dist.get_process_group_ranks(self.group)
                segment = open_segment(self.rank, hosts, world, partial(exchange, self, device), timeout)
            else:
                segment = f"tensors lie in the memory of {device.type}"
            _segments[self.group] = segment
        return segment

    def _start_batch(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        batch = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=rank) for tensor, rank in send]
        batch += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank) for tensor, rank in receive]
        return Works([], dist.batch_isend_irecv(batch) if batch else [])


def exchange_hosts(transport: Transport, device: torch.device) -> Hosts:
    """Which ranks of the transport's group share a host. All of them must call this at the same point."""
    return Hosts.from_ids(exchange(transport, device, [digest(host_id())]))


def exchange(transport: Transport, device: torch.device, values: Sequence[int]) -> list[tuple[int, ...]]:
    """All-gather of a few numbers of 64 bits. All ranks of the transport's group must call this at the same point.

    They go once round a ring, as messages of the group like an algorithm's own: a collective of the backend could meet
    one that the user has started meanwhile. `device` is where the group's messages lie.
    """
    rank, size = transport.rank, transport.size
    told = torch.zeros(size, len(values), dtype=torch.int64, device=device)
    told[rank] = torch.tensor(values)
    lines = told.unbind()
    for step in range(size - 1):
        outgoing, incoming = lines[(rank - step) % size], lines[(rank - step - 1) % size]
        started = transport.start([(outgoing, (rank + 1) % size)], [(incoming, (rank - 1) % size)])
        started.received()
        started.sent()
    return [tuple(line) for line in told.tolist()]


def timeout_of(group: Any, device: torch.device) -> float:
    """Seconds that an operation of this group may take."""
    return group._get_backend(device).options._timeout.total_seconds()
