"""The operations that algorithms are built from: send to and receive from other ranks of a group, without waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from playground.algorithms.transport import Addressed, Started, Transport

if TYPE_CHECKING:
    import torch

    from playground.algorithms.hosts import Hosts
    from playground.runtime.shared_memory import Segment

Observer = Callable[["Messages", Sequence[Addressed], Sequence[Addressed]], None]
"""Is called with what is about to be sent and received."""
_observers: list[Observer] = []


class Messages:
    """This rank's messages in one run of an algorithm over `flat`.

    `rank` and `size` are this rank's number in the group and the group's size; messages are addressed by such numbers.
    `op` is the kind of operation of those that reduce.
    """

    def __init__(self, flat: torch.Tensor, transport: Transport, op: Any = None) -> None:
        self.flat, self.transport, self.op = flat, transport, op
        self.rank, self.size = transport.rank, transport.size
        self.phase = ""
        """The current phase of the algorithm, where phases have names: for observers."""

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

    @property
    def hosts(self) -> Hosts:
        """Which ranks of the group share a host. All must ask; the first time, they exchange it."""
        return self.transport.hosts(self.flat.device)

    @property
    def segment(self) -> Segment | str:
        """The memory that this rank shares with those of its host; why not, where any rank has none. As for `hosts`."""
        return self.transport.segment(self.flat.device)

    def among(self, members: Sequence[int], where: str) -> Messages:
        """Messages among these ranks alone, this one being one of them, numbered by their position in `members`.

        `where` says in the name of a phase which messages these are.
        """
        return MessagesAmong(self, members, where)


class MessagesAmong(Messages):
    """Some ranks' messages among each other. They are messages of the whole group, which observers see as such."""

    def __init__(self, whole: Messages, members: Sequence[int], where: str) -> None:
        super().__init__(whole.flat, whole.transport, whole.op)
        self.whole, self.members, self.where = whole, members, where
        self.rank, self.size = members.index(whole.rank), len(members)

    def start(self, send: Sequence[Addressed] = (), receive: Sequence[Addressed] = ()) -> Started:
        """As for the whole group, with the numbers that the ranks have there."""
        self.whole.phase = f"{self.phase} {self.where}"
        return self.whole.start(
            [(tensor, self.members[rank]) for tensor, rank in send],
            [(tensor, self.members[rank]) for tensor, rank in receive],
        )


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
