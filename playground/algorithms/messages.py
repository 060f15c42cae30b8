"""The parts of our algorithms: messages between the ranks of a group, and adding what has arrived.

Messages are `dist.isend` and `dist.irecv`, called on the group itself: the checks that torch's
functions repeat at every message would be a tenth of the time of a ring. nccl wants the messages of
one step started together, in a batch. Ranks are numbered as in the group. Source:
https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize, proxy

import torch
import torch.distributed as dist

from playground.algorithms import background
from playground.algorithms.operation import ADDS
from playground.algorithms.segment import Segment, open_segment
from playground.base import upstream
from playground.base.host import digest, host_id, ranks_by_host
from playground.world.backends import BACKENDS, backend_of

TAG = 2017
"""Tag of our messages: none is taken for a message of the user's between the same two ranks."""
IN_BATCHES = {backend.device_type for backend in BACKENDS.values() if backend.batches_messages}
"""Kinds of devices on which the messages of one step must be started together."""
Addressed = tuple[torch.Tensor, int]
"""(what, the rank of the group that it goes to or comes from). Tensors are flat and contiguous."""
Group = Any
"""A process group, or a `Subset` of one."""
Hosts = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Subset:
    """Some ranks of a group, this one being one of them, numbered by their position in `members`:
    enough of a process group to send messages of the whole group. `where` says in the name of a
    phase which messages these are."""

    whole: Group
    members: Sequence[int]
    where: str

    def rank(self) -> int:
        return self.members.index(self.whole.rank())

    def size(self) -> int:
        return len(self.members)


def number_in_whole(group: Group, messages: Sequence[Addressed]) -> Sequence[Addressed]:
    """The same messages, with the numbers that ranks have in the whole group."""
    if not isinstance(group, Subset):
        return messages
    return [(tensor, group.members[rank]) for tensor, rank in messages]


@dataclass(eq=False)
class Works:
    """Messages under way."""

    sends: Sequence[Any]
    receives: Sequence[Any]

    def received(self) -> None:
        """Wait until what was to be received is there."""
        for work in self.receives:
            work.wait()

    def sent(self) -> None:
        """Wait until what was to be sent may be written again."""
        for work in self.sends:
            work.wait()


class Executor:
    """Does on this rank what our collectives consist of."""

    def collective(
        self, name: str, call: Callable[[], None], input: torch.Tensor, output: torch.Tensor,
        group: Group,
        async_op: bool,
    ) -> background.Work | None:  # fmt: skip
        """Make the call of a collective, now or in the background. It takes `input`, and leaves
        `output`."""
        calls = background.calls_of(group)
        if async_op:
            return background.start(calls, call, backend_of(group).allows_threads)
        calls.run(call)
        return None

    def run(self, algorithm: Callable[..., None], flat: torch.Tensor, *arguments: Any) -> None:
        """Call `algorithm(flat, *arguments)`, in the thread of the collective."""
        algorithm(flat, *arguments)

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        """Start messages, none of them empty."""
        if isinstance(group, Subset):
            send, receive = number_in_whole(group, send), number_in_whole(group, receive)
            group = group.whole
        first, _ = (send or receive)[0]
        if is_batched(first):
            calls = [(dist.isend, each) for each in send] + [(dist.irecv, each) for each in receive]
            batch = [
                dist.P2POp(call, tensor, group=group, group_peer=rank)
                for call, (tensor, rank) in calls
            ]
            return Works([], dist.batch_isend_irecv(batch))
        sends = [group.send([tensor], rank, TAG) for tensor, rank in send]
        return Works(sends, [group.recv([tensor], rank, TAG) for tensor, rank in receive])

    def add(self, mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
        """Add in place."""
        ADDS[op](mine, theirs, out=mine)


_plain = Executor()
_executor = _plain


class WatchingExecutor(Executor):
    """Leaves all to `inner`, the executor in use when it is made. A subclass looks on: see
    `executed_by`."""

    def __init__(self) -> None:
        self.inner = _executor

    def collective(
        self, name: str, call: Callable[[], None], input: torch.Tensor, output: torch.Tensor,
        group: Group,
        async_op: bool,
    ) -> Any:  # fmt: skip
        return self.inner.collective(name, call, input, output, group, async_op)

    def run(self, algorithm: Callable[..., None], flat: torch.Tensor, *arguments: Any) -> None:
        self.inner.run(algorithm, flat, *arguments)

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        return self.inner.start(group, send, receive)

    def add(self, mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
        self.inner.add(mine, theirs, op)


@contextlib.contextmanager
def executed_by(executor: Executor) -> Iterator[None]:
    """In this block, this executor does what our collectives consist of, on this rank."""
    global _executor
    before, _executor = _executor, executor
    try:
        yield
    finally:
        _executor = before


def executor() -> Executor:
    """The one that is in use."""
    return _executor


def start(group: Group, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> Works:
    """Start these messages. Until they are finished, do not write what is sent nor read what is
    received.

    A message without elements is not sent: both ends know that it is empty.
    """
    send = [(tensor, rank) for tensor, rank in send if tensor.numel()]
    receive = [(tensor, rank) for tensor, rank in receive if tensor.numel()]
    return _executor.start(group, send, receive) if send or receive else Works((), ())


def exchange(
    group: Group, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()
) -> None:
    """Send and receive these, and wait until both are done."""
    works = start(group, send, receive)
    works.received()
    works.sent()


def add(mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
    """Add the second tensor to the first, in place, whatever adding is in this operation."""
    _executor.add(mine, theirs, op)


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether messages of such tensors form batches, which both ends must start alike."""
    return tensor.device.type in IN_BATCHES


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
        works = _plain.start(
            group, [(outgoing, (rank + 1) % size)], [(incoming, (rank - 1) % size)]
        )
        works.received()
        works.sent()
    return [tuple(line) for line in told.tolist()]


def timeout_of(group: Group, device: torch.device) -> float:
    """Seconds that an operation of this group may take."""
    return upstream.timeout_of(group, device).total_seconds()
