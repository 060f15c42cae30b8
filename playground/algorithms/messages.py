"""What every algorithm here is made of: sending to and receiving from the other ranks of a group, without waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from playground.algorithms.transport import Addressed, Started, Transport

if TYPE_CHECKING:
    import torch

Observer = Callable[["Messages", Sequence[Addressed], Sequence[Addressed]], None]
"""Is called with what is about to be sent and received."""
_observers: list[Observer] = []


class Messages:
    """This rank's messages in one run of an algorithm over `flat`.

    `rank` and `size` are this rank's number in the group and the group's size; messages are addressed by such numbers.
    """

    def __init__(self, flat: torch.Tensor, transport: Transport) -> None:
        self.flat, self.transport = flat, transport
        self.rank, self.size = transport.rank, transport.size
        self.phase = ""
        """What the algorithm is at, where it has phases with a name: for those who observe it."""

    def start(self, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> Started:
        """Start these messages. Until they are finished, do not write what is sent nor read what is received.

        A message without elements is not sent: both ends know that it is empty.
        """
        send, receive = drop_empty(send), drop_empty(receive)
        for observer in _observers:
            observer(self, send, receive)
        return self.transport.start(send, receive)

    def exchange(self, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> None:
        """Send and receive these, and wait until both are done."""
        started = self.start(send, receive)
        started.received()
        started.sent()


def drop_empty(messages: Sequence[Addressed]) -> list[Addressed]:
    """The messages that have elements."""
    return [(tensor, rank) for tensor, rank in messages if tensor.numel()]


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Have `observer` called before any messages of this process are started."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
