"""What all hooks share: replaced functions, the ranks of process groups, what is recorded of tensors, and works, which
are what torch or we return, but record when they are waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from playground.see.record.layout import MAX_VALUES
from playground.see.record.recorder import Recorder

Ranks = tuple[int, ...]
Counts = defaultdict[tuple[str, int], Iterator[int]]
"""The numbers of the messages to come: by kind, and by the rank that they go to or come from. Both ends count alike."""


class Groups:
    """Of one recording."""

    def __init__(self) -> None:
        self.ranks: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
        self.counts: defaultdict[tuple[Ranks, int], Counts] = defaultdict(lambda: defaultdict(itertools.count))
        """By group and tag."""

    def ranks_of(self, group: Any) -> Ranks:
        """Its ranks as numbers of the world, in the group's order. None is the whole world."""
        group = group or dist.group.WORLD
        ranks = self.ranks.get(group)
        if ranks is None:
            try:
                ranks = tuple(dist.get_process_group_ranks(group))
            except KeyError:  # torch's RPC makes one of all ranks, which torch.distributed does not know
                ranks = tuple(range(group.size()))
            self.ranks[group] = ranks
        return ranks

    def next_message(self, kind: str, peer: int, ranks: Ranks, tag: int) -> int:
        """The number of the next message of that kind to or from `peer`."""
        return next(self.counts[ranks, tag][kind, peer])


def bytes_of(tensor: torch.Tensor) -> int:
    """Of its elements; of a sparse tensor those of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else 0


def values_of(tensor: torch.Tensor) -> list[float] | None:
    """What it holds, flat; None if it is too large, or where to look would be to wait: on a GPU."""
    if tensor.numel() > MAX_VALUES or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    values: list[float] = tensor.tolist() if tensor.dim() == 1 else tensor.flatten().tolist()
    return values


def values_of_all(tensors: Sequence[torch.Tensor]) -> list[float] | None:
    """The same of several, one after the other."""
    if len(tensors) == 1:
        return values_of(tensors[0])
    if not tensors or sum(tensor.numel() for tensor in tensors) > MAX_VALUES:
        return None
    parts = [values_of(tensor) for tensor in tensors]
    return None if None in parts else [value for part in parts for value in part or ()]


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """In this block, `owner.name` is what `wrap` makes of it."""
    with set_attribute(owner, name, wrap(getattr(owner, name))):
        yield


@contextlib.contextmanager
def set_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block, `owner.name` is `value`."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


TORCH = os.path.join(os.path.dirname(torch.__file__), "")
Pending = tuple[int, Sequence[torch.Tensor]]
"""The number of an event that is under way, and the tensors that will have what came of it."""


def finish(recorder: Recorder, pending: Sequence[Pending]) -> None:
    """These are over, now."""
    recorder.end_all([number for number, _ in pending])
    for number, tensors in pending:
        recorder.put_values(number, values_of_all(tensors))


class IssuedWorks:
    """Works for which torch waits by itself. They are over when their futures are done."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.issued: dict[Any, Pending] = {}
        """What is not known to be over, by its future."""

    def add(self, work: Any, pending: Pending) -> None:
        future = work.get_future()
        self.issued[future] = pending
        future.add_done_callback(lambda _: self.finish(future))

    def finish(self, future: Any) -> None:
        """It is over, now, unless that was known before."""
        pending = self.issued.pop(future, None)
        if pending is not None:
            finish(self.recorder, [pending])

    def finish_done(self) -> None:
        """What is done is over: the thread that is to tell of it, in the callback, may come to it much later."""
        for future in list(self.issued):
            if future.done():
                self.finish(future)


def is_of_torch(caller: FrameType) -> bool:
    """Whether it is a function of torch's that calls."""
    return caller.f_code.co_filename.startswith(TORCH)


class RecordedWork:
    """Stands for a `Work` of torch's or of ours."""

    def __init__(self, recorder: Recorder, work: Any, pending: Sequence[Pending]) -> None:
        self.recorder, self.work, self.pending = recorder, work, pending
        self.when_done: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def __del__(self) -> None:
        """Nobody can wait for it any more."""
        if self.pending and self.work.is_completed():
            self.finish()

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pending:
            return self.work.wait(*args, **kwargs)
        recorder = self.recorder
        wait = recorder.begin_wait([number for number, _ in self.pending], recorder.sources.find())
        try:
            result = self.work.wait(*args, **kwargs)
        finally:
            recorder.end(wait)
        self.finish()
        return result

    def get_future(self) -> Any:
        """Whoever has the future need not wait for the work."""
        future = self.work.get_future()
        future.add_done_callback(lambda _: self.finish())
        return future

    def finish(self) -> None:
        pending, self.pending = self.pending, ()
        self.when_done()
        finish(self.recorder, pending)
