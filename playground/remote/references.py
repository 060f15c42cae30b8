"""Remote references: an object stays with its owner, and others hold numbers that stand for it.

The owner counts who holds one. Whoever passes a reference on has it counted for the other first, so that no count
reaches zero while a reference is under way. Who drops one says so with its next call or answer.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

owners: list[References] = []
"""What this process owns, while its agent is open."""


class RemoteReference:
    """An object on rank `owner`, under a number that the owner gave it."""

    def __init__(self, references: References, owner: int, number: int) -> None:
        self.references, self.owner, self.number = references, owner, number
        weakref.finalize(self, references.drop, owner, number).atexit = False

    def to_here(self) -> Any:
        """A copy of it."""
        return self.references.call(self.owner, read, self)

    def call(self, method: str, *args: Any) -> Any:
        """What this method of the object returns, on the owner's rank."""
        return self.references.call(self.owner, call_method, self, method, args)

    def local_value(self) -> Any:
        """The object itself. Only its owner has it."""
        return self.references.objects[self.number]


class References:
    """The objects that this rank owns, how many references to each there are, and those that were dropped here."""

    def __init__(self, rank: int, size: int, call: Callable[..., Any]) -> None:
        """`call(rank, function, *args)` returns what the function returns on that rank."""
        self.rank, self.size, self.call = rank, size, call
        self.numbers, self.lock = itertools.count(), threading.RLock()
        self.objects: dict[int, Any] = {}
        self.counts: dict[int, int] = {}
        self.dropped: deque[tuple[int, int]] = deque()
        """(owner, number) of references that this rank holds no more, and has not said so yet."""

    def create(self, rank: int, function: Callable[..., Any], *args: Any) -> RemoteReference:
        """A reference to what the function returns on that rank."""
        return RemoteReference(self, rank, self.call(rank, keep, function, args))

    def keep(self, value: Any) -> int:
        """Own an object, to which there is one reference."""
        number = next(self.numbers)
        self.objects[number] = value
        self.count(number, 1)
        return number

    def count(self, number: int, change: int) -> None:
        """There are so many references more, or fewer. Without any the object is forgotten."""
        with self.lock:
            self.counts[number] = self.counts.get(number, 0) + change
            if self.counts[number] > 0:
                return
            del self.counts[number]
            self.objects.pop(number, None)

    def lend(self, obj: Any, rank: int, lent: list[tuple[int, int]]) -> Any:
        """How `rank` is to rebuild a reference, which is counted for it, and added to `lent`; `NotImplemented` for
        another object.

        To its owner it needs no counting: the caller's own reference lives until the reply has come.
        """
        if not isinstance(obj, RemoteReference):
            return NotImplemented
        if rank != obj.owner:
            if obj.owner == self.rank:
                self.count(obj.number, 1)
            else:
                self.call(obj.owner, count, obj.number, 1)
            lent.append((obj.owner, obj.number))
        return borrow, (obj.owner, obj.number)

    def drop(self, owner: int, number: int) -> None:
        """A reference is no more. This may happen in the middle of anything, so another owner is told later."""
        if owner == self.rank:
            self.count(number, -1)
        else:
            self.dropped.append((owner, number))

    def give_back(self) -> None:
        """Tell the owners of what was dropped here."""
        while self.dropped:
            try:
                owner, number = self.dropped.popleft()
            except IndexError:  # other threads take some too
                return
            with contextlib.suppress(dist.DistNetworkError):  # the owner is lost, and the object with it
                self.call(owner, count, number, -1)


def keep(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """On the owner: the number of what the function returned."""
    return owned().keep(function(*args))


def count(number: int, change: int) -> None:
    """On the owner: count references."""
    owned().count(number, change)


def read(reference: RemoteReference) -> Any:
    """On the owner: the object."""
    return reference.local_value()


def call_method(reference: RemoteReference, method: str, args: tuple[Any, ...]) -> Any:
    """On the owner: call a method of the object."""
    return getattr(reference.local_value(), method)(*args)


def borrow(owner: int, number: int) -> RemoteReference:
    """On any rank: the reference that has arrived."""
    references = owned()
    if owner not in range(references.size):
        raise ValueError(f"a reference to an object on rank {owner}: there are ranks 0 to {references.size - 1}")
    if owner == references.rank:
        references.count(number, 1)
    return RemoteReference(references, owner, number)


def owned() -> References:
    """What this rank owns."""
    return owners[-1]
