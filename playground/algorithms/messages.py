"""The parts of our algorithms: messages between the ranks of a group, and adding what has arrived.

Messages are `dist.isend` and `dist.irecv`, called on the group itself: the checks that torch's
functions repeat at every message would be a tenth of the time of a ring. nccl wants the messages of
one step started together, in a batch. Ranks are numbered as in the group. Source:
https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize, proxy

import torch
import torch.distributed as dist

from playground.algorithms.executor import PLAIN, Addressed, Group, Works, executor
from playground.algorithms.segment import Segment, open_segment
from playground.base import upstream
from playground.base.host import digest, host_id, ranks_by_host

Hosts = tuple[tuple[int, ...], ...]


def start(group: Group, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> Works:
    """Start these messages. Until they are finished, do not write what is sent nor read what is
    received.

    A message without elements is not sent: both ends know that it is empty.
    """
    send = [(tensor, rank) for tensor, rank in send if tensor.numel()]
    receive = [(tensor, rank) for tensor, rank in receive if tensor.numel()]
    return executor().start(group, send, receive) if send or receive else Works((), ())


def exchange(
    group: Group, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()
) -> None:
    """Send and receive these, and wait until both are done."""
    works = start(group, send, receive)
    works.received()
    works.sent()


def add(mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
    """Add the second tensor to the first, in place, whatever adding is in this operation."""
    executor().add(mine, theirs, op)


_hosts: WeakKeyDictionary[Any, Hosts] = WeakKeyDictionary()
"""For groups whose ranks have exchanged them."""
_segments: WeakKeyDictionary[Any, Segment | str] = WeakKeyDictionary()
"""The memory that this rank shares with others of the group, or why there is none."""


def hosts_of(group: Group, device: torch.device) -> Hosts:
    """For each host the ranks of the group that it has. All must ask at the same point; the first
    time, they exchange it. `device` is where the group's messages lie."""
    if group not in _hosts:
        _hosts[group] = ranks_by_host(all_gather_numbers(group, device, [digest(host_id())]))
    return _hosts[group]


def segment_of(group: Group, device: torch.device) -> Segment | str:
    """The memory that this rank shares with those of its host; why not, where any rank has none. As
    for `hosts_of`."""
    segment = _segments.get(group)
    if segment is None:
        hosts, timeout = hosts_of(group, device), partial(timeout_of, proxy(group), device)
        if device.type == "cpu":
            world = dist.get_process_group_ranks(group)
            gather = partial(all_gather_numbers, group, device)
            segment = open_segment(group.rank(), hosts, world, gather, timeout)
            if isinstance(segment, Segment):
                finalize(group, segment.leave)
        else:
            segment = f"tensors lie in the memory of {device.type}"
        _segments[group] = segment
    return segment


def all_gather_numbers(
    group: Group, device: torch.device, values: Sequence[int]
) -> list[tuple[int, ...]]:
    """All-gather of a few numbers of 64 bits. All ranks of the group must call this at the same
    point.

    They go once round a ring, as messages of the group like an algorithm's own: a collective of the
    backend could meet one that the user has started meanwhile.
    """
    rank, size = group.rank(), group.size()
    told = torch.zeros(size, len(values), dtype=torch.int64, device=device)
    told[rank] = torch.tensor(values)
    lines = told.unbind()
    for step in range(size - 1):
        outgoing, incoming = lines[(rank - step) % size], lines[(rank - step - 1) % size]
        works = PLAIN.start(group, [(outgoing, (rank + 1) % size)], [(incoming, (rank - 1) % size)])
        works.received()
        works.sent()
    return [tuple(line) for line in told.tolist()]


def timeout_of(group: Group, device: torch.device) -> float:
    """Seconds that an operation of this group may take."""
    return upstream.timeout_of(group, device).total_seconds()
