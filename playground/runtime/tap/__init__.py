"""Where every call of torch.distributed passes: the methods of `ProcessGroup`, and those of `Work`.

Functions of torch.distributed call these, and so do our algorithms and remote calls. As long as nobody observes,
torch's own methods are in place. An `Observer` is told, in the thread where it happens:

- `begun(call)`: the rank is about to call an operation. A `Call` says what is known of it: the operation, the group and
  its ranks, the tensors in and out, the peer or the root, the tag, and whether the program waits in it.
- `returned(call)`: the call has returned to the program, and the operation goes on.
- `waiting(calls)`, `waited(calls)`: the program waits for a work, that of one call or, where a backend makes one work
  of a batch, of several. A call that blocks waits in itself: of that only `done` is told.
- `done(calls)`: they are over, and what they have received is there: once for each, and before the program knows.
- `failed(calls, error)`: the call, or the wait for it, has raised.
- `dropped(calls)`: the program has let go of the work without having waited.

What has to be faster than that puts functions of its own in the place of the same methods: see `replacement`. What
DistributedDataParallel averages in C++ calls no method of Python's.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from playground.runtime.tap.replacement import Replacement, Wrap


class Operation(NamedTuple):
    """A method of a process group."""

    name: str
    """That of its function in torch.distributed; of `send` and `recv`, those that block have it."""
    input_at: int | None
    output_at: int | None
    """Which parameter is what this rank gives, and which is what it gets: a tensor, a list of them, or of lists."""


OPERATIONS = {
    "allreduce": Operation("all_reduce", 0, 0),
    "allreduce_coalesced": Operation("all_reduce_coalesced", 0, 0),
    "broadcast": Operation("broadcast", 0, 0),
    "reduce": Operation("reduce", 0, 0),
    "allgather": Operation("all_gather", 1, 0),
    "allgather_coalesced": Operation("all_gather_coalesced", 1, 0),
    "_allgather_base": Operation("all_gather_into_tensor", 1, 0),
    "all_gather_single": Operation("all_gather_into_tensor", 1, 0),
    "gather": Operation("gather", 1, 0),
    "scatter": Operation("scatter", 1, 0),
    "reduce_scatter": Operation("reduce_scatter", 1, 0),
    "_reduce_scatter_base": Operation("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_single": Operation("reduce_scatter_tensor", 1, 0),
    "alltoall": Operation("all_to_all", 1, 0),
    "alltoall_base": Operation("all_to_all_single", 1, 0),
    "all_to_all_single": Operation("all_to_all_single", 1, 0),
    "barrier": Operation("barrier", None, None),
    "monitored_barrier": Operation("monitored_barrier", None, None),
    "send": Operation("send", 0, None),
    "recv": Operation("recv", None, 0),
    "recv_anysource": Operation("recv", None, 0),
}
"""By the name of the method. Those that this torch lacks are left out: names differ between its versions."""
OPERATIONS = {method: operation for method, operation in OPERATIONS.items() if hasattr(ProcessGroup, method)}
MESSAGES = ("send", "recv", "recv_anysource")
"""The methods that are no collectives."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""The operations that have a root."""
_ranks: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def ranks_of(group: Any) -> tuple[int, ...]:
    """The group's ranks in the world, in the group's order; None is the world's. Of a group that torch.distributed does
    not know, as one of torch's RPC, its own ranks."""
    group = group or dist.group.WORLD
    if group not in _ranks:
        try:
            _ranks[group] = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):
            return tuple(range(group.size()))
    return _ranks[group]


def number_of(group: Any) -> int:
    """A number of the process group: the same on all its ranks, a different one for other groups of these ranks."""
    name: str = group.group_name
    return int(name) if name.isdecimal() else zlib.crc32(name.encode())


@dataclass(eq=False)
class Call:
    """A call of an operation by this rank."""

    number: int
    """Its place among the rank's calls, as all observers see them."""
    method: str
    """The method of the process group: a key of `OPERATIONS`."""
    group: Any
    args: Sequence[Any]
    blocks: bool
    """Whether the program waits in the call. One that does not has a work, which the program may wait for."""
    work: Any = None
    """A weak reference to its work."""

    @property
    def name(self) -> str:
        """That of the function in torch.distributed: all_reduce, send, isend, …"""
        name = OPERATIONS[self.method].name
        return f"i{name}" if self.method in MESSAGES and not self.blocks else name

    @property
    def ranks(self) -> tuple[int, ...]:
        return ranks_of(self.group)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What this rank gives: empty for a scatter on all ranks but the root."""
        return self.tensors(OPERATIONS[self.method].input_at)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What this rank gets: empty for a gather on all ranks but the root."""
        return self.tensors(OPERATIONS[self.method].output_at)

    def tensors(self, at: int | None) -> list[torch.Tensor]:
        value = () if at is None else self.args[at]
        if isinstance(value, torch.Tensor):
            return [value]
        return [tensor for each in value for tensor in ([each] if isinstance(each, torch.Tensor) else each)]

    @cached_property
    def peer(self) -> int | None:
        """Rank in the world: the receiver, the sender, or the root. None if there is none, or the sender is anyone."""
        if self.method in ("send", "recv"):
            return self.ranks[self.args[1]]
        if OPERATIONS[self.method].name in ROOTED:
            return self.ranks[self.args[-1].rootRank]
        return None

    @property
    def tag(self) -> int:
        return int(self.args[-1]) if self.method in MESSAGES else 0

    def find_sender(self) -> int:
        """Rank in the world of the one that has sent what was received from anyone, while there is the work."""
        return self.ranks[self.work()._source_rank()]


class Observer:
    """Is told what this rank calls, from `observing` on: see the module's docstring."""

    def begun(self, call: Call) -> None: ...

    def returned(self, call: Call) -> None: ...

    def waiting(self, calls: Sequence[Call]) -> None: ...

    def waited(self, calls: Sequence[Call]) -> None: ...

    def done(self, calls: Sequence[Call]) -> None: ...

    def failed(self, calls: Sequence[Call], error: BaseException) -> None: ...

    def dropped(self, calls: Sequence[Call]) -> None: ...


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell this observer in this block."""
    _tap.add(observer)
    try:
        yield
    finally:
        _tap.discard(observer)


class Tap:
    """Tells observers. It is in place as long as there is one."""

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.one_at_a_time = threading.Lock()
        self.numbers = itertools.count()
        self.works: dict[int, tuple[Any, list[Call]]] = {}
        """Of calls that go on: a weak reference to the work, and what it is the work of, by its id."""
        self.thread = threading.local()
        """`batch`: the calls of the batch that this thread is starting, if the backend makes one work of them."""
        places: dict[str, Wrap] = {method: partial(self.wrap_operation, method) for method in OPERATIONS}
        places |= {"_start_coalescing": self.wrap_start_batch, "_end_coalescing": self.wrap_end_batch}
        self.replacements = [Replacement(ProcessGroup, method, wrap) for method, wrap in places.items()]
        self.replacements += [Replacement(Work, "wait", self.wrap_wait)]
        self.replacements += [Replacement(Work, "get_future", self.wrap_get_future)]

    def add(self, observer: Observer) -> None:
        with self.one_at_a_time:
            if not self.observers:
                for each in self.replacements:
                    each.install()
            self.observers = (*self.observers, observer)

    def discard(self, observer: Observer) -> None:
        with self.one_at_a_time:
            self.observers = tuple(each for each in self.observers if each is not observer)
            if not self.observers:
                for each in self.replacements:
                    each.remove()
                self.works.clear()

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def operation(group: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call(next(self.numbers), method, group, (*args, *kwargs.values()), is_blocking())
            for each in self.observers:
                each.begun(call)
            try:
                work = real(group, *args, **kwargs)
            except BaseException as error:
                for each in self.observers:
                    each.failed([call], error)
                raise
            batch = getattr(self.thread, "batch", None)
            if batch is not None:
                batch.append(call)
            elif work is None:
                self.finish([call])
            else:
                self.follow(work, [call])
            return work

        return operation

    def follow(self, work: Any, calls: list[Call]) -> None:
        """These calls go on in this work."""
        key = id(work)
        reference = ref(work, lambda _: self.forget(key))
        self.works[key] = reference, calls
        for call in calls:
            call.work = reference
            if not call.blocks:
                for each in self.observers:
                    each.returned(call)

    def finish(self, calls: list[Call]) -> None:
        for each in self.observers:
            each.done(calls)

    def forget(self, key: int) -> None:
        """A work is gone."""
        if (entry := self.works.pop(key, None)) and entry[0]() is None:
            for each in self.observers:
                each.dropped(entry[1])

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry = self.works.pop(id(work), None)
            if entry is None:
                return real(work, *args, **kwargs)
            calls, observers = entry[1], self.observers
            told = () if calls[0].blocks else observers
            for each in told:
                each.waiting(calls)
            try:
                result = real(work, *args, **kwargs)
            except BaseException as error:
                for each in told:
                    each.waited(calls)
                for each in observers:
                    each.failed(calls, error)
                raise
            for each in told:
                each.waited(calls)
            self.finish(calls)
            return result

        return wait

    def wrap_get_future(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            future = real(work)
            if entry := self.works.get(id(work)):

                def finish(_: Any) -> None:
                    if self.works.get(id(work)) is entry:
                        del self.works[id(work)]
                        self.finish(entry[1])

                future.add_done_callback(finish)
            return future

        return get_future

    def wrap_start_batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def start_coalescing(*args: Any) -> None:
            self.thread.batch = []
            real(*args)

        return start_coalescing

    def wrap_end_batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def end_coalescing(*args: Any) -> Any:
            batch, self.thread.batch = getattr(self.thread, "batch", None), None
            work = real(*args)
            if batch:
                self.finish(batch) if work is None else self.follow(work, batch)
            return work

        return end_coalescing


def is_blocking() -> bool:
    """Whether the function of torch.distributed that has called an operation waits for it. (No version of torch tells
    its groups, and a call of a method itself never waits.)"""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"].startswith("torch.distributed."):
        code = frame.f_code
        if code.co_name in ("send", "recv", "monitored_barrier"):
            return True
        if "async_op" in code.co_varnames:
            return not frame.f_locals["async_op"]
        frame = frame.f_back
    return False


_tap = Tap()
