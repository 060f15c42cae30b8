"""In a rank: operations write to its flight recorder.

What the tap calls in the place of torch's methods is as short as can be: a rank calls it all the
time. What it cannot read makes the rank unknown: see `wait_graph`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from datetime import timedelta
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils.data import DataLoader, IterableDataset

from playground.base.errors import LOST_PEER
from playground.base.upstream import default_store
from playground.explain.hang.activity import clues
from playground.explain.hang.box import Box, Known
from playground.explain.hang.box_format import GPU, MAIN, MAY_GIVE_UP, Description
from playground.explain.hang.ddp import DDPCalls
from playground.explain.hang.functional import FunctionalCalls
from playground.explain.hang.recording import ZERO, FlightRecorder
from playground.explain.hang.states import (
    COLLECTIVE,
    FORM_WORLD,
    NEW_GROUP,
    RECEIVE,
    SEND,
    SPLIT_GROUP,
)
from playground.tap import MESSAGES, METHODS, number_of, ranks_of
from playground.tap.methods import ROOT_AT, root_of
from playground.tap.observer import Recorded
from playground.tap.replacement import calling
from playground.tap.tap import record

LIMITED = "barrier", "monitored_barrier"
"""Collectives that functions of torch.distributed give a timeout."""
TWICE = "reduce_scatter", "monitored_barrier"
"""Methods that gloo counts as more than one collective."""
TORCH = vars(distributed_c10d)
Reader = Callable[[Box, Any, Any], tuple[Known, bool, Sequence[int]]]
"""Reads a call's group and arguments: what the box knows it by, whether it may give up before the
world does, and the shape of its tensor. May raise what torch would raise for them."""


class Hooks(FlightRecorder):
    """Operations of this process write to `box`, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.works: dict[int, int] = {}
        """Numbers of operations by the id of their work. (An id is used again: then it is the later
        one's.)"""
        self.here = threading.local()
        """`counted`: the tensor of the message that this thread is handing to a backend."""
        self.functional = FunctionalCalls(self)
        self.ddp = DDPCalls(self)
        stand_ins: dict[tuple[Any, str], Callable[..., Any]] = {
            (torch.Future, "then"): self.add_callback,
            (torch.Future, "add_done_callback"): self.add_callback,
            (distributed_c10d, "_new_group_with_tag"): self.new_group,
            (ProcessGroup, "_start_coalescing"): self.start_batch,
            (ProcessGroup, "_end_coalescing"): self.end_batch,
            (distributed_c10d, "destroy_process_group"): self.destroy,
            (dist, "destroy_process_group"): self.destroy,
            (DataLoader, "__iter__"): self.go_through,
        }
        for method in MESSAGES:
            stand_ins[Backend, method] = partial(self.send_unnamed, method)
        others = {  # in this version of torch or another
            (ProcessGroup, "split_group"): self.split_group,
            (ProcessGroup, "_get_backend"): self.get_backend,
            (ProcessGroup, "get_backend"): self.get_backend,
            (distributed_c10d, "get_backend_impl"): self.get_backend,
            (dist, "get_backend_impl"): self.get_backend,
        }
        for owner in (ProcessGroup, Backend):  # what changes a timeout
            others[owner, "set_timeout"] = others[owner, "_set_default_timeout"] = self.set_timeout
        stand_ins |= {place: each for place, each in others.items() if hasattr(*place)}
        stand_ins |= self.ddp.stand_ins
        self.places = {place: calling(each) for place, each in stand_ins.items()}
        clues.checks.append(self.check_groups)

    def begin_program(self, box: Box, timeout: timedelta) -> None:
        """From now on, operations write to `box`. `timeout` is the world's."""
        record(self)
        box.begin_program()
        self.timeout = timeout
        self.works.clear()
        self.functional.results.clear()
        self.box = box
        self.functional.find()
        known = (each() for each in self.alive.values())
        self.gone.update(group for group in known if group is not None)
        self.forget_groups()

    def continue_program(self) -> None:
        """The program that has returned goes on, in the same process group."""
        if self.box:
            self.box.continue_program()

    def begin_world(self) -> None:
        """The program has formed a world of its own."""
        if self.box:
            self.box.begin_world(dist.get_rank())
            self.forget_groups()

    def forming_world(
        self, size: int, timeout: timedelta | None, place: str = ""
    ) -> contextlib.AbstractContextManager[object]:
        """A block in which this rank waits for all `size` to form a world, `timeout` at most. If
        that is not the one that was launched, by its ranks' numbers, `place` is where it is."""
        if not self.box:
            return contextlib.nullcontext()
        number, ranks = zlib.crc32(place.encode()), tuple(range(size))
        world = Description(COLLECTIVE, FORM_WORLD, ranks, dtype=place, number=number)
        known = self.box.describe(world, world)
        return self.inside(self.box, known, limited=self.is_limit(timeout))

    def forget_groups(self) -> None:
        """Begin with those of the world that has just been formed, if there is one."""
        for kept in (self.limited, self.tallies, self.alive, self.on_gpu):
            kept.clear()
        self.ddp.forget_models()
        if dist.is_initialized():
            self.read_group(dist.group.WORLD, is_new=True)

    def read_group(self, group: Any, is_new: bool = False) -> None:
        """Each first call of a kind comes here: it may be the first since the module of functional
        collectives has been imported."""
        if self.box:
            self.functional.find()
        super().read_group(group, is_new)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations write nowhere in this block, whose time is taken: to write takes some
        microseconds for each. All ranks must pause at the same point."""
        box = self.box
        self.box = None
        try:
            yield
        finally:
            self.box = box
            for each in [*self.tallies]:
                self.count_as_known(each)

    def end_program(self) -> None:
        """The program has returned. Its threads may go on."""
        if self.box:
            self.check_groups()
            self.box.end_program()

    def forget(self) -> None:
        """Operations write nowhere: this process has been forked from the rank."""
        self.box = None

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Recorded:
        """What makes a call of this method, and records it: see `FastObserver`."""
        is_message, is_twice = method in MESSAGES, method in TWICE
        read = self.message_reader(method) if is_message else self.collective_reader(method)

        def operation(
            group: Any,
            given: Sequence[Any] | None,
            args: tuple[object, ...],
            kwargs: dict[str, object],
        ) -> Any:
            box = self.box
            if box is None:
                return real(group, *args, **kwargs)
            try:
                known, limited, shape = read(box, group, given)
            except (TypeError, ValueError, IndexError, AttributeError):
                known = None
            if known is None:
                return self.call_unnamed(method, real, group, *args, **kwargs)
            number = box.call(known, 4, limited, shape)
            queues = self.queues if self.queues and self.is_on_gpu(group, given) else None
            if queues:
                peer = given[1] if is_message and given else None
                queues.add(box, number, (id(group), peer))
            is_main, words = get_ident() == box.main_thread, box.words
            if is_main:
                words[MAIN] = number
            try:
                work = real(group, *args, **kwargs)
            except BaseException as error:
                if not LOST_PEER.search(str(error)):  # it had begun
                    box.take_back(number, known)
                raise
            finally:
                if is_main:
                    words[MAIN] = box.around
                if is_message:
                    self.here.counted = None
            if work is None:
                box.end(number)
                if queues:
                    queues.hold(number)
            else:
                self.works[id(work)] = number
            if is_twice:
                self.count_as_known(id(group))
            return work

        return operation

    def collective_reader(self, method: str) -> Reader:
        """What reads the calls of a collective."""
        name, given_at, got_at = METHODS[method]
        # of the two, the argument that is a whole tensor on all ranks
        at = (got_at if name in ("scatter", "reduce_scatter") else given_at) or 0
        has_root, has_limit = method in ROOT_AT, name in LIMITED

        def read(box: Box, group: Any, given: Any) -> tuple[Known, bool, Sequence[int]]:
            tensor = given[at] if len(given) > at else None
            while type(tensor) is list or type(tensor) is tuple:  # of tensors, or of lists of them
                tensor = tensor[0] if len(tensor) == 1 else None
            shape, dtype = (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else ((), "")
            root = root_of(method, given) if has_root else None
            op = reduction_of(given) if self.queues else 0
            key = id(group), name, dtype, root, op
            known = box.known.get(key)
            if known is None:
                what = Description(COLLECTIVE, name, dtype=dtype, peer=root, tag=op)
                known = self.describe(box, key, group, what)
            limited = id(group) in self.limited
            if has_limit or _getframe(3).f_globals is not TORCH:  # whose functions set no other's
                limited = limited or any(map(self.is_limit, map(find_timeout, given)))
            return known, limited, shape

        return read

    def message_reader(self, method: str) -> Reader:
        """What reads the calls of a message. It leaves the tensor with this thread, for
        `send_unnamed`."""
        kind = SEND if method == "send" else RECEIVE

        def read(box: Box, group: Any, given: Any) -> tuple[Known, bool, Sequence[int]]:
            tensor = given[0][0]
            key = id(group), kind, tensor.dtype, *given[1:]
            known = box.known.get(key)
            if known is None:
                *peer, tag = map(operator.index, given[1:])
                tag = 0 if self.is_on_gpu(group, tensor) else tag  # which NCCL does not look at
                number = peer[0] if peer else None
                what = Description(kind, kind, dtype=tensor.dtype, peer=number, tag=tag)
                known = self.describe(box, key, group, what)
            self.here.counted = tensor
            return known, id(group) in self.limited, tensor.shape

        return read

    def call_unnamed(self, method: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call in a way that is not known here. Most likely torch refuses it."""
        result = real(*args, **kwargs)
        if self.box:
            self.box.doubt(f"what it has called by {method}")
        return result

    def send_unnamed(
        self, method: str, real: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A method of a backend. Its messages pass by no method of the group's, and are counted
        nowhere, unless it is handed a counted one by a backend in Python."""
        counted = getattr(self.here, "counted", None)
        self.here.counted = None
        if counted is not None and args and args[0][0] is counted:
            return real(backend, *args, **kwargs)
        return self.call_unnamed(f"{method} of a backend", real, backend, *args, **kwargs)

    def get_backend(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What gives a group's backend. What the program calls of one in Python passes no method of
        torch's."""
        backend, caller = real(*args, **kwargs), _getframe(2).f_globals.get("__name__", "")
        is_theirs = not caller.startswith(("torch.", "playground."))
        if self.box and is_theirs and hasattr(backend, "__dict__"):
            self.box.doubt("what it calls of a backend in Python")
        return backend

    def set_timeout(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        finally:
            if self.box:
                self.box.known.clear()  # so that it is read again

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`Work.wait`, in which the main thread is in the operation of that work."""

        @functools.wraps(real)
        def wait(work: Any, timeout: timedelta = ZERO, *args: Any, **kwargs: Any) -> Any:
            box, number = self.box, self.works.pop(id(work), None)
            if box is None or number is None or args or kwargs or type(timeout) is not timedelta:
                return real(work, timeout, *args, **kwargs)
            is_main, words = get_ident() == box.main_thread, box.words
            if self.is_limit(timeout):
                box.end(number, MAY_GIVE_UP)
            if self.queues and words[GPU]:
                self.queues.hold(number)
            if is_main:
                words[MAIN] = number
            try:
                return real(work, timeout)
            finally:
                if is_main:
                    words[MAIN] = box.around
                box.end(number)

        return wait

    def destroy(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The end of the world, or of a group."""
        is_of_world = not any((*args, *kwargs.values()))
        if self.queues and is_of_world and dist.is_initialized():
            return self.queues.destroy(real, *args, **kwargs)
        return real(*args, **kwargs)

    def go_through(self, real: Callable[..., Any], loader: Any) -> Any:
        """The program begins to go through a DataLoader."""
        with contextlib.suppress(Exception):  # the program's own sampler may have no length
            # one of an IterableDataset would warn later, had it been asked for its length
            if self.box and not isinstance(loader.dataset, IterableDataset):
                self.box.note_loader(len(loader), 3)
        return real(loader)

    def start_batch(self, real: Callable[..., Any], group: Any, *args: Any) -> Any:
        if self.queues and id(group) in self.on_gpu:
            self.queues.begin_batch()
        return real(group, *args)

    def end_batch(self, real: Callable[..., Any], group: Any, *args: Any) -> Any:
        box = self.box
        batch = self.queues.end_batch(box) if self.queues and box else None
        if box is None or batch is None:
            return real(group, *args)
        with self.main_thread_in(box, batch):
            work = real(group, *args)
        if work is not None:
            self.works[id(work)] = batch
        return work

    def add_callback(
        self, real: Callable[..., Any], future: Any, callback: Callable[[Any], Any]
    ) -> Any:
        """Know of a future's callback as long as it has not run."""

        def run(done: Any) -> Any:
            try:
                return callback(done)
            finally:
                clues.callbacks.discard(run)

        clues.callbacks.add(run)
        return real(future, run)

    def new_group(
        self, real: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Record the making of a group as a collective of those that have to come."""
        # an iterator can be read only once, and torch reads it, too
        ranks = ranks if ranks is None or isinstance(ranks, Sized) else [*ranks]
        box = self.box
        if box is None or not dist.is_initialized():
            return real(ranks, *args, **kwargs)
        call = inspect.signature(real).bind(ranks, *args, **kwargs).arguments
        world = ranks_of(dist.group.WORLD)
        members = world if ranks is None else tuple(sorted(map(int, ranks)))
        come = members if call.get("use_local_synchronization") else world
        limits = call.get("timeout"), default_store().timeout
        making = Description(COLLECTIVE, NEW_GROUP, come, members=members)
        known = box.describe(making, making)
        with self.inside(box, known, limited=any(map(self.is_limit, limits))):
            group = real(ranks, *args, **kwargs)
        if isinstance(group, ProcessGroup):  # otherwise this rank is none of it
            self.read_group(group, is_new=True)
        return group

    def split_group(
        self, real: Callable[..., Any], parent: Any, ranks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record the splitting of a group as a collective of the new group's members."""
        box = self.box
        members = tuple(rank for number, rank in enumerate(ranks_of(parent)) if number in ranks)
        if box is None or dist.get_rank() not in members:
            return real(parent, ranks, *args, **kwargs)
        limits = *map(find_timeout, (*args, *kwargs.values())), default_store().timeout
        splitting = Description(COLLECTIVE, SPLIT_GROUP, members, number=number_of(parent))
        known = box.describe(splitting, splitting)
        with self.inside(box, known, limited=any(map(self.is_limit, limits))):
            return real(parent, ranks, *args, **kwargs)


def reduction_of(given: Sequence[Any]) -> int:
    """The number that torch has for the reduction of a call; 0 if it has none."""
    for each in given:
        if op := getattr(each, "reduceOp", None):
            return int(getattr(op, "op", op))
    return 0


def find_timeout(argument: Any) -> timedelta | None:
    """The timeout that an argument of a call is, or has; below 0 if it is left to the group."""
    timeout = getattr(argument, "timeout", argument)
    return timeout if isinstance(timeout, timedelta) else None


hooks = Hooks()
os.register_at_fork(after_in_child=hooks.forget)
