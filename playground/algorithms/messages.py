"""What every algorithm here is made of: sending to and receiving from the other ranks of a group, without waiting.

These are `dist.isend` and `dist.irecv`, called on the group itself: what torch's own functions check anew at every
message would be a tenth of the time of a ring. nccl wants the messages of one step started together, in a batch.
Source: https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime.backends import backend_of

TAG = 2017
"""Of our messages, so that none is taken for one the user has under way between the same two ranks."""

Addressed = tuple[torch.Tensor, int]
"""(what, the rank it goes to or comes from)."""
Observer = Callable[["Messages", Sequence[Addressed], Sequence[Addressed]], None]
"""Is called with what is about to be sent and received."""
_observers: list[Observer] = []


class Messages:
    """This rank's end of the lines to the others, in one run of an algorithm over `flat`.

    `rank` and `size` are this rank's number in the group and the group's size; `to` and `from` mean such numbers.
    """

    def __init__(self, flat: torch.Tensor, group: Any) -> None:
        self.flat, self.group = flat, group
        self.rank, self.size = group.rank(), group.size()
        self.batched = backend_of(group).batches_messages

    def start(self, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> Started:
        """Start these messages. Until they are finished, do not write what is sent nor read what is received.

        A message without elements is not sent: both ends know that it is empty.
        """
        send, receive = not_empty(send), not_empty(receive)
        for observer in _observers:
            observer(self, send, receive)
        if self.batched:
            return self._start_batch(send, receive)
        sends = [self.group.send([tensor], rank, TAG) for tensor, rank in send]
        return Started(sends, [self.group.recv([tensor], rank, TAG) for tensor, rank in receive])

    def _start_batch(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Started:
        batch = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=rank) for tensor, rank in send]
        batch += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank) for tensor, rank in receive]
        return Started([], dist.batch_isend_irecv(batch) if batch else [])

    def exchange(self, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> None:
        """Send and receive these, and wait until both are done."""
        started = self.start(send, receive)
        started.received()
        started.sent()


def not_empty(messages: Sequence[Addressed]) -> list[Addressed]:
    return [(tensor, rank) for tensor, rank in messages if tensor.numel()]


class Started:
    """Messages under way."""

    def __init__(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        self.sends, self.receives = sends, receives

    def received(self) -> None:
        """Wait until what was to be received is there."""
        for work in self.receives:
            work.wait()

    def sent(self) -> None:
        """Wait until what was to be sent may be written again."""
        for work in self.sends:
            work.wait()


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Have `observer` called before any messages of this process are started."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
