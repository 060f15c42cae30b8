"""Where every call of torch.distributed passes: the methods of `ProcessGroup`, and those of `Work`.

Functions of torch.distributed call these, and so do our algorithms and remote calls. As long as
nobody observes or records, torch's own methods are in place. An `Observer` is told, in the thread
where it happens:

- `begun(call)`: the rank is about to call an operation. A `Call` says what is known of it: the
  operation, the group and its ranks, the tensors in and out, the peer or the root, the tag, and
  whether the program waits in it.
- `returned(call)`: the method of the group has returned; the operation may go on.
- `waiting(calls)`, `waited(calls)`: the program waits for a work, that of one call or, where a
  backend makes one work of a batch, of several. A call that blocks waits in itself: of that nothing
  is told but `done`.
- `done(calls)`: they are over, and what they have received is there: once for each, and before the
  program knows.
- `failed(calls, error)`: the call, or the wait for it, has raised.
- `dropped(calls)`: the program has let go of the work without having waited for the end.

The thread is the current one, and the program's line is found from there by
`explain.hang.sources`. The flight recorder has to be faster than that, and is told in another way:
see `Recorder`. What DistributedDataParallel averages in C++ calls no method of Python's: only
an observer that `looks_inside` is told of it, see `native`. What a training program does besides,
with its models and its data, an observer that `looks_at_training` is told.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from playground.base.upstream import (
    batch_iterator,
    find_caller,
    hide_from_compiler,
    list_groups,
)
from playground.tap import native
from playground.tap.replacement import Replacement, Wrap, calling


class Method(NamedTuple):
    """A method of a process group."""

    name: str
    """That of its function in torch.distributed; of `send` and `recv`, those that block have it."""
    input_at: int | None
    output_at: int | None
    """Which parameter is what this rank gives, and which is what it gets: a tensor, a list of them,
    or of lists."""


METHODS = {
    "allreduce": Method("all_reduce", 0, 0),
    "allreduce_coalesced": Method("all_reduce_coalesced", 0, 0),
    "broadcast": Method("broadcast", 0, 0),
    "reduce": Method("reduce", 0, 0),
    "allgather": Method("all_gather", 1, 0),
    "allgather_coalesced": Method("all_gather_coalesced", 1, 0),
    "allgather_into_tensor_coalesced": Method("all_gather_into_tensor_coalesced", 1, 0),
    "all_gather_single_coalesced": Method("all_gather_into_tensor_coalesced", 1, 0),
    "_allgather_base": Method("all_gather_into_tensor", 1, 0),
    "all_gather_single": Method("all_gather_into_tensor", 1, 0),
    "gather": Method("gather", 1, 0),
    "scatter": Method("scatter", 1, 0),
    "reduce_scatter": Method("reduce_scatter", 1, 0),
    "_reduce_scatter_base": Method("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_single": Method("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter_tensor_coalesced", 1, 0),
    "reduce_scatter_single_coalesced": Method("reduce_scatter_tensor_coalesced", 1, 0),
    "alltoall": Method("all_to_all", 1, 0),
    "alltoall_base": Method("all_to_all_single", 1, 0),
    "all_to_all_single": Method("all_to_all_single", 1, 0),
    "barrier": Method("barrier", None, None),
    "monitored_barrier": Method("monitored_barrier", None, None),
    "send": Method("send", 0, None),
    "recv": Method("recv", None, 0),
    "recv_anysource": Method("recv", None, 0),
}
"""By the name of the method. Those that this torch lacks are left out: names differ between its
versions."""
METHODS = {
    method: operation for method, operation in METHODS.items() if hasattr(ProcessGroup, method)
}
MESSAGES = ("send", "recv", "recv_anysource")
ROOT_AT = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}
"""By the name of the method: which parameter is the root, or options that have it."""
PARAMETER = re.compile(r"[(,] ?(\w+): ")
SIGNATURES = {
    method: [
        PARAMETER.findall(line)[1:]  # without self
        for line in (getattr(ProcessGroup, method).__doc__ or "").splitlines()
        if f"{method}(self: " in line
    ]
    for method in METHODS
}
"""By the name of the method, the parameters of each of its overloads: C++ tells them in its
documentation alone."""
_ranks: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def by_position(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any] | None:
    """The arguments of a method's call by position, None in the place of one that is left out; None
    if it takes no such arguments."""
    if not kwargs:
        return args
    for names in SIGNATURES[method]:
        rest = names[len(args) :]
        if kwargs.keys() <= {*rest}:
            return (*args, *(kwargs.get(name) for name in rest[: 1 + max(map(rest.index, kwargs))]))
    return None


def root_of(method: str, args: Sequence[Any]) -> int | None:
    """The root of a call, as a number in its group, 0 by default; None if the call has none."""
    if method not in ROOT_AT:
        return None
    given = args[ROOT_AT[method]] if len(args) > ROOT_AT[method] else 0
    root = getattr(given, "rootRank", given)
    return root if isinstance(root, int) else None


def ranks_of(group: Any) -> tuple[int, ...]:
    """The group's ranks in the world, in the group's order; None is the world's. Of a group that
    torch.distributed does not know, as one of torch's RPC, its own ranks."""
    group = group or dist.group.WORLD
    if group not in _ranks:
        try:
            _ranks[group] = tuple(dist.get_process_group_ranks(group))
        except KeyError:
            return tuple(range(group.size()))
    return _ranks[group]


def number_of(group: Any) -> int:
    """A number of the process group: the same on all its ranks, a different one for other groups of
    these ranks."""
    name: str = group.group_name
    return int(name) if name.isdecimal() else zlib.crc32(name.encode())


@dataclass(eq=False)
class Call:
    """A call of an operation by this rank."""

    number: int
    """Its place among the rank's calls, as all observers see them."""
    method: str
    """The method of the process group: a key of `METHODS`."""
    in_group: InitVar[Any]
    """The process group. The call keeps no more than a weak reference to it: threads of gloo keep
    calls, and a group whose last owner is one of its own threads aborts the process."""
    args: Sequence[Any]
    blocks: bool
    """Whether the program gets no work to wait for: it waits in the call, or torch keeps the work
    to itself."""
    is_torchs: bool = False
    """Whether torch keeps the work to itself, and may wait for it later."""
    in_cpp: bool = False
    """Whether C++ has called it: only observers that look inside are told."""
    is_functional: bool = False
    """Whether it is a functional collective called in C++, which `wait_tensor` waits for."""
    has_future: bool = False
    """Whether somebody has asked the work for its future: what it is handed to may wait, unseen."""
    is_polled: bool = False
    """Whether somebody has asked the work whether it is done."""
    work: Any = None
    ranks: tuple[int, ...] = field(init=False)
    """Those of the group in the world, in its order."""
    weak_group: ReferenceType[Any] = field(init=False)

    def __post_init__(self, in_group: Any) -> None:
        self.ranks, self.weak_group = ranks_of(in_group), ref(in_group)

    @property
    def group(self) -> Any:
        """The process group; None once it is gone."""
        return self.weak_group()

    @property
    def name(self) -> str:
        """That of the function in torch.distributed: all_reduce, send, isend, …"""
        name = METHODS[self.method].name
        return f"i{name}" if self.method in MESSAGES and not self.blocks else name

    @property
    def is_left_to_backward(self) -> bool:
        """Whether the end of the backward pass that calls it waits for it, if nobody does
        before."""
        return self.has_future or (self.in_cpp and not self.is_functional)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """This rank's inputs: empty for a scatter on all ranks but the root."""
        return self.tensors(METHODS[self.method].input_at)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """This rank's outputs: empty for a gather on all ranks but the root."""
        return self.tensors(METHODS[self.method].output_at)

    def tensors(self, at: int | None) -> list[torch.Tensor]:
        value = () if at is None else self.args[at]
        if isinstance(value, torch.Tensor):
            return [value]
        return [
            tensor
            for each in value
            for tensor in ([each] if isinstance(each, torch.Tensor) else each)
        ]

    @property
    def number_of_peer(self) -> int | None:
        """The receiver, the sender, or the root, as a number in the group, which may have no such
        rank. None if the call has none, or the sender is anyone."""
        return self.args[1] if self.method in ("send", "recv") else root_of(self.method, self.args)

    @property
    def peer(self) -> int | None:
        """`number_of_peer` as a rank in the world; None if the group has no such rank, too."""
        number = self.number_of_peer
        return None if number is None else dict(enumerate(self.ranks)).get(number)

    @property
    def tag(self) -> int:
        return int(self.args[-1]) if self.method in MESSAGES else 0

    def find_sender(self) -> int:
        """Rank in the world of the one that has sent what was received from anyone, while there is
        the work."""
        return self.ranks[self.work()._source_rank()]


class Observer:
    """Is told what this rank calls, from `observing` on: see the module's docstring."""

    looks_at_calls = True
    """Whether it is told of calls."""
    looks_inside = False
    """Whether it is also told what torch does by itself: of its calls in C++ `begun`, `returned`
    and `completed`, and `waiting` and `waited` where Python sees them; of waits for work that torch
    keeps to itself; and of backward passes."""

    looks_at_ends = True
    """Who looks inside: whether it needs `completed` of the calls of Python's, which costs each of
    them a callback."""

    def begun(self, call: Call) -> None: ...

    def returned(self, call: Call) -> None: ...

    def waiting(self, calls: Sequence[Call]) -> None: ...

    def waited(self, calls: Sequence[Call]) -> None: ...

    def done(self, calls: Sequence[Call]) -> None: ...

    def failed(self, calls: Sequence[Call], error: BaseException) -> None: ...

    def dropped(self, calls: Sequence[Call]) -> None: ...

    def completed(self, call: Call) -> None:
        """Who looks inside: the backend has done an asynchronous call. In a thread of the
        backend's, which must not wait; on a GPU, its stream waits for the call."""

    def backward_begun(self, root: Any) -> None:
        """Who looks inside or at training: a backward pass begins in this thread, from this tensor
        or these."""

    def backward_ended(self) -> None:
        """Who looks inside or at training: it has ended, and so has what it started and did not
        hand out."""

    looks_at_training = False
    """Whether it is also told what follows, and of backward passes."""

    def model_wrapped(self, model: DistributedDataParallel) -> None:
        """Who looks at training: a model has been wrapped, and its replicas are equal."""

    def model_called(self, model: DistributedDataParallel, args: Sequence[Any]) -> None:
        """Who looks at training: the forward pass of a wrapped model begins."""

    def model_loaded(self, module: nn.Module) -> None:
        """Who looks at training: a module's `load_state_dict` has returned."""

    def samples_drawn(self, sampler: DistributedSampler[Any]) -> None:
        """Who looks at training: an iteration over a sampler begins."""

    def batch_loaded(self, iterator: Any, batch: Any) -> None:
        """Who looks at training: an iterator of a data loader returns a batch."""

    def file_saved(self, file: Any, saved: Any) -> None:
        """Who looks at training: `torch.save` has written this into a file, given by its path or
        open."""

    def file_loaded(self, file: Any) -> None:
        """Who looks at training: `torch.load` is about to read a file, given by its path or
        open."""


class Recorder:
    """Is told of each call nearest to torch's own method, and has to be fast: it is asked once what
    to call in the method's place. This one records nothing."""

    def __init__(self) -> None:
        self.places: dict[tuple[Any, str], Wrap] = {}
        """Further functions that it replaces, by owner and name."""

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Recorded:
        return lambda group, given, args, kwargs: real(group, *args, **kwargs)

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return real


Recorded = Callable[[Any, "Sequence[Any] | None", tuple[object, ...], dict[str, object]], Any]
"""Makes a call: of the group, the arguments as `by_position` has them, and those as given."""


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell this observer in this block."""
    _tap.add(observer)
    try:
        yield
    finally:
        _tap.discard(observer)


def record(recorder: Recorder) -> None:
    """From now on, tell this recorder."""
    with _tap.one_at_a_time:
        _tap.record(recorder)


def record_also(places: Mapping[tuple[Any, str], Wrap]) -> None:
    """Have the recorder replace further functions, as of a module that is imported by now."""
    with _tap.one_at_a_time:
        _tap.recorded += [Replacement(*place, wrap) for place, wrap in places.items()]
        _tap.put_in_place(_tap.wanted)


@dataclass(eq=False, slots=True)
class UnderWay:
    """Calls that have returned and are not over."""

    calls: list[Call]
    work: Any
    future: Any = None
    """The work's, if somebody has asked for it."""


class Tap:
    """Tells observers and the recorder. It is in place as long as there is one."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.all: tuple[Observer, ...] = ()
        self.observers: tuple[Observer, ...] = ()
        """Those that look at calls."""
        self.inside: tuple[Observer, ...] = ()
        """Those that look inside."""
        self.tells_ends = False
        """Whether one of those needs `completed` of the calls of Python's."""
        self.training: tuple[Observer, ...] = ()
        """Those that look at training."""
        self.one_at_a_time = threading.Lock()
        self.numbers = itertools.count()
        self.works: dict[int, UnderWay] = {}
        """By the id of the work, as long as the program has that."""
        self.open: set[UnderWay] = set()
        self.thread = threading.local()
        """`batch`: the calls of the batch that this thread is starting, if the backend makes one
        work of them; `in_call`: whether it is in an operation that Python has called."""
        self.listened_to: WeakSet[Any] = WeakSet()
        """Process groups whose hooks tell of calls in C++."""
        self.in_cpp: dict[tuple[int, int], Call] = {}
        """Calls that C++ is making, by the group's id and the number that its hooks have for it."""
        self.functional: dict[int, Call] = {}
        """Those that `wait_tensor` will wait for, by where the tensor lies."""
        self.futures: dict[int, tuple[Any, UnderWay]] = {}
        """By the id of the work's future, as long as the program has that."""
        places: dict[str, Wrap] = {
            method: partial(self.wrap_operation, method) for method in METHODS
        }
        self.calls = [Replacement(ProcessGroup, *place) for place in places.items()]
        self.calls += [Replacement(Work, "wait", self.wrap_wait)]
        self.ends = [
            Replacement(ProcessGroup, "_start_coalescing", calling(self.start_batch)),
            Replacement(ProcessGroup, "_end_coalescing", calling(self.end_batch)),
            Replacement(Work, "get_future", calling(self.get_future)),
            Replacement(Work, "is_completed", calling(self.poll)),
        ]
        """Only observers have to be told of."""
        self.within: list[Replacement] = []
        """Only observers that look inside have to be told of."""
        self.passes = [Replacement(torch.autograd, "backward", calling(self.backward))]
        """Only observers that look inside or at training have to be told of."""
        trained: dict[tuple[Any, str], Callable[..., Any]] = {
            (DistributedDataParallel, "__init__"): self.wrap_model,
            (DistributedDataParallel, "forward"): self.call_model,
            (nn.Module, "load_state_dict"): self.load_model,
            (DistributedSampler, "__iter__"): self.draw_samples,
            (batch_iterator(), "__next__"): self.load_batch,
            (torch, "save"): self.save_file,
            (torch, "load"): self.load_file,
        }
        self.trained = [Replacement(*place, calling(each)) for place, each in trained.items()]
        """Only observers that look at training have to be told of."""
        self.recorded: list[Replacement] = []
        self.in_place: list[Replacement] = []

    def add(self, observer: Observer) -> None:
        with self.one_at_a_time:
            if observer.looks_inside and not self.within:
                self.within = self.find_inside()
            self.tell((*self.all, observer))
            if observer.looks_inside:
                for group in list_groups():
                    self.listen(group)

    def discard(self, observer: Observer) -> None:
        with self.one_at_a_time:
            for entry in list(self.open):
                # the thread that calls callbacks is late
                if entry.future is not None and entry.future.done():
                    self.finish(entry)
            self.tell(tuple(each for each in self.all if each is not observer))
            if not self.inside:
                self.stop_listening()
            if not self.observers:
                self.works.clear()
                self.open.clear()

    def tell(self, observers: tuple[Observer, ...]) -> None:
        """From now on, tell these."""
        self.all = observers
        self.observers = tuple(each for each in observers if each.looks_at_calls)
        self.inside = tuple(each for each in observers if each.looks_inside)
        self.tells_ends = any(each.looks_at_ends for each in self.inside)
        self.training = tuple(each for each in observers if each.looks_at_training)
        self.put_in_place(self.wanted)

    def record(self, recorder: Recorder | None) -> None:
        if recorder is self.recorder:
            return
        self.put_in_place([])  # what is in place has asked the one before
        self.recorder = recorder
        places = recorder.places if recorder else {}
        self.recorded = [Replacement(*place, wrap) for place, wrap in places.items()]
        self.put_in_place(self.wanted)

    @property
    def wanted(self) -> list[Replacement]:
        """What is to be in place for those that are told now."""
        calls = self.calls if self.recorder or self.observers else []
        ends = self.ends if self.observers else []
        within = self.within if self.inside else []
        passes = self.passes if self.inside or self.training else []
        trained = self.trained if self.training else []
        return [*calls, *self.recorded, *ends, *within, *passes, *trained]

    def put_in_place(self, wanted: list[Replacement]) -> None:
        for each in self.in_place:
            if each not in wanted:
                each.remove()
        for each in wanted:
            if each not in self.in_place:
                each.install()
        self.in_place = wanted

    def find_inside(self) -> list[Replacement]:
        """What is to be in place for observers that look inside."""
        from torch.distributed import _functional_collectives  # nothing else here needs it

        within: dict[tuple[Any, str], Callable[..., Any]] = {
            (distributed_c10d, "_register_process_group"): self.register_group,
            (ProcessGroup, "split_group"): self.split_group,
            (_functional_collectives, "wait_tensor"): self.wait_tensor,
            (_functional_collectives, "wait_tensors"): self.wait_tensor,
            (torch.Future, "wait"): self.wait_future,
        }
        return [
            Replacement(*place, calling(stand_in))
            for place, stand_in in within.items()
            if hasattr(*place)  # in this version of torch
        ]

    def leave(self) -> None:
        """This process has been forked from the rank: it is recorded no more."""
        self.one_at_a_time = threading.Lock()
        self.record(None)

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        recorded = (self.recorder or Recorder()).wrap_operation(method, real)

        @wraps(real)
        def operation(group: Any, *args: Any, **kwargs: Any) -> Any:
            given = by_position(method, args, kwargs) if kwargs else args
            if not self.observers or given is None:
                return recorded(group, given, args, kwargs)
            # as newer versions of torch tell
            waits = bool(given) and not getattr(given[-1], "asyncOp", True)
            blocks, by_torch = (True, False) if waits else find_caller(method in MESSAGES)
            call = Call(next(self.numbers), method, group, given, blocks or by_torch, by_torch)
            for each in self.observers:
                each.begun(call)
            self.thread.in_call = True
            try:
                work = recorded(group, given, args, kwargs)
            except BaseException as error:
                for each in self.observers:
                    each.failed([call], error)
                raise
            finally:
                self.thread.in_call = False
            for each in self.observers:
                each.returned(call)
            batch = getattr(self.thread, "batch", None)
            if batch is not None:
                batch.append(call)
            elif work is None:
                for each in self.observers:
                    each.done([call])
            else:
                self.follow(work, [call], may_be_dropped=not blocks)
                if by_torch:
                    work.get_future()
                if self.tells_ends and not blocks and method not in MESSAGES:
                    native.call_when_done(work, partial(self.complete, call))
            return work

        return operation

    def follow(self, work: Any, calls: list[Call], may_be_dropped: bool = True) -> None:
        """These calls go on in this work."""
        key = id(work)
        entry = UnderWay(calls, ref(work, (lambda _: self.forget(key)) if may_be_dropped else None))
        self.works[key] = entry
        self.open.add(entry)
        for call in calls:
            call.work = entry.work

    def finish(self, entry: UnderWay) -> None:
        """These calls are over, unless that has been told."""
        try:
            self.open.remove(entry)
        except KeyError:
            return
        for each in self.observers:
            each.done(entry.calls)

    def forget(self, key: int) -> None:
        """A work is gone."""
        entry = self.works.pop(key, None)
        if entry is not None and entry.future is None and entry in self.open:
            self.open.discard(entry)
            for each in self.observers:
                each.dropped(entry.calls)

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        recorded = (self.recorder or Recorder()).wrap_wait(real)

        @wraps(real)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry = self.works.get(id(work))
            if entry is None or not (entry in self.open or self.inside):
                return recorded(work, *args, **kwargs)
            calls = entry.calls
            observers = self.who_hears_of_wait(entry)
            for each in observers:
                each.waiting(calls)
            try:
                result = recorded(work, *args, **kwargs)
            except BaseException as error:
                for each in self.observers:
                    each.failed(calls, error)
                raise
            finally:
                for each in observers:
                    each.waited(calls)
            self.finish(entry)
            self.works.pop(id(work), None)  # nothing keeps its tensors
            return result

        return wait

    def who_hears_of_wait(self, entry: UnderWay) -> tuple[Observer, ...]:
        """Who is told that the program, or torch, waits for these calls."""
        call = entry.calls[0]
        if call.is_torchs or entry not in self.open:
            return self.inside if call.is_torchs or not call.blocks else ()
        return () if call.blocks else self.observers

    def get_future(self, real: Callable[..., Any], work: Any) -> Any:
        future = real(work)
        entry = self.works.get(id(work))
        for call in entry.calls if entry else ():
            call.has_future = True
        if entry is not None and entry.future is None and entry in self.open:
            entry.future = future
            future.add_done_callback(lambda _: self.finish(entry))
        if entry is not None and self.inside:
            key = id(future)
            self.futures[key] = ref(future, lambda _: self.futures.pop(key, None)), entry
        return future

    def poll(self, real: Callable[..., Any], work: Any) -> Any:
        entry = self.works.get(id(work))
        for call in entry.calls if entry else ():
            call.is_polled = True
        return real(work)

    def wait_future(self, real: Callable[..., Any], future: Any) -> Any:
        """Who waits for the future of a work waits for the work."""
        _, entry = self.futures.pop(id(future), (None, None))
        with self.waited_for(entry.calls if entry else []):
            return real(future)

    @contextlib.contextmanager
    def waited_for(self, calls: list[Call]) -> Iterator[None]:
        """In this block the program waits for these calls: tell who looks inside."""
        observers = self.inside if calls else ()
        for each in observers:
            each.waiting(calls)
        try:
            yield
        finally:
            for each in observers:
                each.waited(calls)

    def start_batch(self, real: Callable[..., Any], *args: Any) -> None:
        self.thread.batch = []
        real(*args)

    def end_batch(self, real: Callable[..., Any], *args: Any) -> Any:
        batch = getattr(self.thread, "batch", None)
        self.thread.batch = None
        work = real(*args)
        if batch and work is not None:
            self.follow(work, batch)
        elif batch:
            for each in self.observers:
                each.done(batch)
        return work

    def listen(self, group: Any) -> None:
        """Hear of what C++ calls in this group."""
        if group not in self.listened_to:
            self.listened_to.add(group)
            known = ref(group)  # a group that its own hooks hold would never be gone
            native.listen(
                group, partial(self.before_native, known), partial(self.after_native, known)
            )

    def stop_listening(self) -> None:
        for group in [*self.listened_to]:
            native.stop_listening(group)
        self.listened_to.clear()
        self.in_cpp.clear()
        self.functional.clear()

    def register_group(self, real: Callable[..., Any], name: str, group: Any) -> Any:
        self.listen(group)
        return real(name, group)

    def split_group(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (group := real(*args, **kwargs)) is not None:
            self.listen(group)
        return group

    @partial(hide_from_compiler, with_calls=True)
    def before_native(self, known: Callable[[], Any], hook: Any) -> None:
        """An operation is about to be called. Of those that Python calls, all is told already."""
        method = native.METHODS.get(hook.name.name)
        group = known()
        if getattr(self.thread, "in_call", False) or method is None or group is None:
            return
        args = native.arguments(method, hook, ROOT_AT.get(method))
        call = Call(next(self.numbers), method, group, args, blocks=False, in_cpp=True)
        call.is_functional = native.is_functional()
        self.in_cpp[id(known), hook.op_id] = call
        for each in self.inside:
            each.begun(call)

    @partial(hide_from_compiler, with_calls=True)
    def after_native(self, known: Callable[[], Any], hook: Any) -> None:
        """It has been called."""
        call = self.in_cpp.pop((id(known), hook.op_id), None)
        if call is None:
            return
        if call.is_functional:
            for tensor in call.outputs or call.inputs:
                self.functional[tensor.data_ptr()] = call
        for each in self.inside:
            each.returned(call)
        if hook.work is None or not native.call_when_done(hook.work, partial(self.complete, call)):
            self.complete(call)

    def complete(self, call: Call) -> None:
        for each in self.inside:
            each.completed(call)

    def wait_tensor(self, real: Callable[..., Any], given: Any) -> Any:
        """What waits for one tensor, or for several, that a functional collective has returned."""
        if torch.compiler.is_compiling():
            return real(given)
        calls = []
        for tensor in given if isinstance(given, list) else [given]:
            if type(tensor) is torch.Tensor and self.functional:
                calls += [self.functional.pop(tensor.data_ptr(), None)]
        with self.waited_for([call for call in calls if call]):
            return real(given)

    def backward(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observers = tuple(each for each in self.all if each.looks_inside or each.looks_at_training)
        for each in observers:
            each.backward_begun(args[0] if args else kwargs.get("tensors"))
        try:
            return real(*args, **kwargs)
        finally:
            for each in observers:
                each.backward_ended()

    def wrap_model(self, real: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
        real(model, *args, **kwargs)
        for each in self.training:
            each.model_wrapped(model)

    def call_model(self, real: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for each in self.training:
                each.model_called(model, (*args, *kwargs.values()))
        return real(model, *args, **kwargs)

    def load_model(self, real: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(module, *args, **kwargs)
        for each in self.training:
            each.model_loaded(module)
        return result

    def draw_samples(self, real: Callable[..., Any], sampler: Any) -> Any:
        for each in self.training:
            each.samples_drawn(sampler)
        return real(sampler)

    def load_batch(self, real: Callable[..., Any], iterator: Any) -> Any:
        batch = real(iterator)
        for each in self.training:
            each.batch_loaded(iterator, batch)
        return batch

    def save_file(
        self, real: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any
    ) -> None:
        real(obj, f, *args, **kwargs)
        for each in self.training:
            each.file_saved(f, obj)

    def load_file(self, real: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        for each in self.training:
            each.file_loaded(f)
        return real(f, *args, **kwargs)


_tap = Tap()
os.register_at_fork(after_in_child=_tap.leave)
