"""What does, on a rank, what our collectives consist of: start messages between the ranks of a
group, and add. Others that look on, as a recorder, take its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from playground.algorithms import background
from playground.algorithms.operation import ADDS
from playground.world.backends import BACKENDS, backend_of

TAG = 2017
"""Tag of our messages: none is taken for a message of the user's between the same two ranks."""
IN_BATCHES = {backend.device_type for backend in BACKENDS.values() if backend.batches_messages}
"""Kinds of devices on which the messages of one step must be started together."""
Addressed = tuple[torch.Tensor, int]
"""(what, the rank of the group that it goes to or comes from). Tensors are flat and contiguous."""
Group = Any
"""A process group, or a `Subset` of one."""


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


class CollectiveCall(NamedTuple):
    """A call of a collective of ours."""

    name: str
    call: Callable[[], None]
    """What makes it, in whatever thread."""
    input: torch.Tensor
    """What it takes."""
    output: torch.Tensor
    """What it leaves."""
    group: Group
    async_op: bool


class Executor:
    """Does on this rank what our collectives consist of."""

    def collective(self, made: CollectiveCall) -> background.Work | None:
        """Make the call of a collective, now or in the background."""
        calls = background.calls_of(made.group)
        if made.async_op:
            return background.start(calls, made.call, backend_of(made.group).allows_threads)
        calls.run(made.call)
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


PLAIN = Executor()
_executor = PLAIN


class WatchingExecutor(Executor):
    """Leaves all to `inner`, the executor in use when it is made. A subclass looks on: see
    `executed_by`."""

    def __init__(self) -> None:
        self.inner = _executor

    def collective(self, made: CollectiveCall) -> Any:
        return self.inner.collective(made)

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


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether messages of such tensors form batches, which both ends must start alike."""
    return tensor.device.type in IN_BATCHES
