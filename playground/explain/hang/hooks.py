"""In a rank: operations write to its flight recorder.

What the tap calls in the place of torch's methods is as short as can be: a rank calls it all the
time. DistributedDataParallel averages in C++, where no method of Python's is called: its backward
pass counts as one collective.

A group's own count of collectives, where it has one, tells whether all of them came by here. What
came otherwise, or cannot be read, makes the rank unknown: see `wait_graph`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from playground.base.errors import LOST_PEER
from playground.base.event_log import NONE
from playground.base.upstream import (
    FUNCTIONAL,
    count_collectives,
    default_store,
    is_carried_by_nccl,
    is_joining,
    is_registered,
    read_timeout,
    resolve_group,
)
from playground.explain.hang import (
    BACKWARD,
    BUCKETS,
    BUFFERS,
    COLLECTIVE,
    FORM_WORLD,
    HOST,
    MAKE_DDP,
    NEW_GROUP,
    RECEIVE,
    SEND,
    SPLIT_GROUP,
    STRANGERS,
    Gpu,
)
from playground.explain.hang.activity import callbacks, checks, spinning, waits
from playground.explain.hang.box import GPU, MAIN, MAY_GIVE_UP, Box, Known
from playground.explain.hang.queues import Queues
from playground.tap import (
    MESSAGES,
    METHODS,
    ROOT_AT,
    Recorded,
    Recorder,
    number_of,
    ranks_of,
    record,
    record_also,
    root_of,
)
from playground.tap.replacement import calling

LIMITED = "barrier", "monitored_barrier"
"""Collectives that functions of torch.distributed give a timeout."""
TWICE = "reduce_scatter", "monitored_barrier"
"""Methods that gloo counts as more than one collective."""
FUNCTIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
}
"""Functional collectives, with the names of the functions of torch.distributed that do the same:
the ones that others call, such as all_gather_tensor. They call operators of C++ and no method of
the group's."""
ZERO = timedelta(0)
TORCH = vars(distributed_c10d)
Reader = Callable[[Box, Any, Any], tuple[Known, bool, Sequence[int]]]
"""Reads a call's group and arguments: what the box knows it by, whether it may give up before the
world does, and the shape of its tensor. May raise what torch would raise for them."""


@dataclass(slots=True)
class Tally:
    """How many operations a group has counted itself, besides those that are counted by this
    process's box."""

    group: ref[Any]
    known: int
    inside: int = 0
    """How many collectives with others inside are under way: these are not counted one by one."""
    places: set[int] = field(default_factory=set)
    """The places of its counts in the box."""


class Hooks(Recorder):
    """Operations of this process write to `box`, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.box: Box | None = None
        self.timeout = ZERO
        """The world's, which ends before any longer one does."""
        self.limited: set[int] = set()
        """Ids of the groups whose operations have, or may have, a limit that ends before the
        world's."""
        self.tallies: dict[int, Tally] = {}
        """By the id of the group, of those that count."""
        self.alive: dict[int, ref[Any]] = {}
        """The groups that have been seen, by id: what is known by the id of a group goes with
        it."""
        self.works: dict[int, int] = {}
        """Numbers of operations by the id of their work. (An id is used again: then it is the later
        one's.)"""
        self.results: dict[int, int] = {}
        """Numbers of functional collectives by the storage of what they return."""
        self.finds_functions = False
        """Whether functional collectives are recorded: once their module has been imported."""
        self.forwarded: dict[int, Any] = {}
        """The groups of models whose gradients a backward pass through their outputs averages, and
        the models' numbers, by the model's id."""
        self.here = threading.local()
        """`counted`: the tensor of the message that this thread is handing to a backend."""
        self.queues: Queues | None = None
        """The streams of this rank's GPU, once a group is carried by NCCL."""
        self.on_gpu: dict[int, bool] = {}
        """By the id of each such group, whether NCCL carries all its tensors, those of the host
        too."""
        self.reached: set[int] = set()
        """Those that the backward pass under way has come to."""
        self.passes: dict[int, list[int]] = {}
        """The operations that this pass is, by the same ids, as `inside` has them."""
        self.reducers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """The groups of models and their numbers, by the object of C++ that averages."""
        self.models: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The numbers of models among those of their group, from 1 on."""
        self.made: Counter[tuple[tuple[int, ...], int]] = Counter()
        """How many models have been made on each group."""
        stand_ins: dict[tuple[Any, str], Callable[..., Any]] = {
            (torch.Future, "then"): self.add_callback,
            (torch.Future, "add_done_callback"): self.add_callback,
            (DistributedDataParallel, "__init__"): partial(self.call_ddp, MAKE_DDP),
            (DistributedDataParallel, "_sync_buffers"): partial(self.call_ddp, BUFFERS),
            (DistributedDataParallel, "forward"): self.forward,
            (dist.Reducer, "_rebuild_buckets"): self.rebuild_buckets,
            (torch.autograd, "backward"): self.backward,
            (distributed_c10d, "_new_group_with_tag"): self.new_group,
            (ProcessGroup, "_start_coalescing"): self.start_batch,
            (ProcessGroup, "_end_coalescing"): self.end_batch,
            (distributed_c10d, "destroy_process_group"): self.destroy,
            (dist, "destroy_process_group"): self.destroy,
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
        self.places = {place: calling(each) for place, each in stand_ins.items()}
        checks.append(self.check_groups)

    def begin_program(self, box: Box, timeout: timedelta) -> None:
        """From now on, operations write to `box`. `timeout` is the world's."""
        record(self)
        box.begin_program()
        self.timeout = timeout
        self.works.clear()
        self.results.clear()
        self.box = box
        self.find_functions()
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
        limited, number = self.is_limit(timeout), zlib.crc32(place.encode())
        ranks = tuple(range(size))
        return self.inside(self.box, FORM_WORLD, ranks, (), number, limited, place=place)

    def find_functions(self) -> None:
        """Record functional collectives from now on, if their module has been imported."""
        module = sys.modules.get(FUNCTIONAL)
        if self.finds_functions or not hasattr(module, "wait_tensor"):
            return
        self.finds_functions = True
        places: dict[str, Callable[..., Any]] = {
            name: partial(self.call_function, known) for name, known in FUNCTIONS.items()
        }
        places |= {"wait_tensor": self.wait_for_result, "wait_tensors": self.wait_for_result}
        record_also(
            {
                (module, name): calling(each)
                for name, each in places.items()
                if hasattr(module, name)
            }
        )

    def call_function(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A functional collective. It returns at once, and its result is waited for when it is
        used."""
        if torch.compiler.is_compiling():  # dynamo must not trace what follows
            return real(*args, **kwargs)
        box = self.box
        try:
            given = inspect.signature(real).bind(*args, **kwargs).arguments
            group = resolve_group(given["group"], given.get("tag", ""))
            tensor, *_ = given.values()
        except (TypeError, KeyError, ValueError, RuntimeError):  # as torch will say itself
            box = None
        if box is None or not isinstance(tensor, Tensor | list):
            return real(*args, **kwargs)
        dtype: Any = ""
        shape: tuple[int, ...] = ()
        if isinstance(tensor, Tensor):
            dtype, shape = tensor.dtype, tuple(map(int, tensor.shape))
        key = id(group), name, dtype, given.get("src")
        known = box.known.get(key) or self.describe(
            box, key, group, COLLECTIVE, name, dtype, given.get("src"), 0
        )
        with self.counted_apart(id(group)):
            call = box.call(known, 4, id(group) in self.limited, shape)
            if self.queues and self.is_on_gpu(group, tensor):
                self.queues.add(box, call, (id(group), None))
            with self.main_thread_in(box, call):
                try:
                    result = real(*args, **kwargs)
                except BaseException:
                    box.take_back(call, known)
                    raise
            if self.find_unseen(id(group)) < 0:  # it was traced, and has called nothing
                box.take_back(call, known)
        for each in result if isinstance(result, list) else [result]:
            self.results[storage_of(each)] = call
        return result

    def wait_for_result(self, real: Callable[..., Any], waited: Any) -> Any:
        box = None if torch.compiler.is_compiling() else self.box
        if box is None or not self.results:
            return real(waited)
        parts = waited if isinstance(waited, list) else [waited]
        found = [self.results.pop(storage_of(each), NONE) for each in parts]
        calls = [call for call in found if call != NONE]
        if self.queues and box.words[GPU]:
            for call in calls:
                self.queues.hold(call)
        with self.main_thread_in(box, calls[-1]) if calls else contextlib.nullcontext():
            result = real(waited)
        for call in calls:
            box.end(call)
        return result

    @contextlib.contextmanager
    def main_thread_in(self, box: Box, call: int) -> Iterator[None]:
        """If this is the main thread, it is in this operation."""
        is_main, before = get_ident() == box.main_thread, box.words[MAIN]
        if is_main:
            box.words[MAIN] = call
        try:
            yield
        finally:
            if is_main:
                box.words[MAIN] = before

    @contextlib.contextmanager
    def counted_apart(self, key: int) -> Iterator[None]:
        """What the group counts in this block is what the block knows of."""
        self.check_groups()
        tally = self.tallies.get(key)
        if tally:
            tally.inside += 1
        try:
            yield
        finally:
            if tally:
                tally.inside -= 1
                self.count_as_known(key)

    def forget_groups(self) -> None:
        """Begin with those of the world that has just been formed, if there is one."""
        for kept in (
            self.limited, self.tallies, self.alive, self.forwarded, self.made, self.on_gpu,
        ):  # fmt: skip
            kept.clear()
        if dist.is_initialized():
            self.read_group(dist.group.WORLD, is_new=True)

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

    def is_limit(self, timeout: timedelta | None) -> bool:
        """Whether a timeout ends before the world's, so that the program may go on."""
        return timeout is not None and ZERO < timeout < self.timeout

    def read_group(self, group: Any, is_new: bool = False) -> None:
        """Read the timeout of a group and, if it `is_new`, how many collectives it took to make it.
        Each first call of a kind comes here."""
        box, key = self.box, id(group)
        if box is None:
            return
        self.find_functions()
        timeout = read_timeout(group)
        if timeout is not None and timeout >= self.timeout:
            self.limited.discard(key)
        else:
            self.limited.add(key)
        if key in self.alive and not is_new:
            return

        def forget(_: Any) -> None:  # another may get its id
            if self.alive.pop(key, None):
                self.tallies.pop(key, None)
                if self.on_gpu.pop(key, None) is not None and self.queues:
                    self.queues.forget_group(key)
                if self.box:
                    self.box.known.clear()

        self.alive[key] = ref(group, forget)
        if is_carried_by_nccl(group):
            self.watch_gpu(box, group)
        if not is_registered(group):
            box.doubt("which ranks a group has that torch.distributed did not register")
            return
        counted = count_collectives(group)
        if counted is not None:
            self.tallies[key] = Tally(ref(group), counted if is_new else 0)

    def describe(
        self, box: Box, key: Any, group: Any, kind: str, name: str, dtype: Any, peer: Any, tag: int
    ) -> Known:
        """From now on, operations like this are known by `key`. `peer` is a number in the group;
        None is anyone."""
        self.read_group(group)
        ranks = ranks_of(group)
        if peer is not None:
            # torch refuses a root that is none, and waits for a message for ever
            no_rank = None if kind == COLLECTIVE else STRANGERS + peer
            peer = dict(enumerate(ranks)).get(peer, no_rank)
        known = box.describe(key, (kind, name, ranks, dtype, peer, tag, number_of(group), ()))
        # which NCCL counts apart
        is_counted = kind == COLLECTIVE or id(group) not in self.on_gpu
        if is_counted and (tally := self.tallies.get(id(group))):
            tally.places.add(known[1])
        return known

    def check_groups(self) -> None:
        """Doubt what this rank is said to have called if its groups have counted more
        operations."""
        for key, tally in [*self.tallies.items()]:
            if not tally.inside and self.find_unseen(key) > 0 and self.box:
                self.box.doubt("what it has called by other ways than Python's")

    def find_unseen(self, key: int) -> int:
        """How many more operations this group has counted than this rank has been seen to call."""
        tally, box = self.tallies.get(key), self.box
        group = tally.group() if tally else None
        counted = None if group is None else count_collectives(group)
        if tally is None or box is None or counted is None:
            return 0
        return counted - tally.known - sum(box.words[place] for place in [*tally.places])

    def count_as_known(self, key: int) -> None:
        """What this group has counted by now is known."""
        if tally := self.tallies.get(key):
            tally.known += self.find_unseen(key)

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Recorded:
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
        name, given_at, got_at = METHODS[method]
        # the one that all ranks have
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
                known = self.describe(box, key, group, COLLECTIVE, name, dtype, root, op)
            limited = id(group) in self.limited
            if has_limit or _getframe(3).f_globals is not TORCH:  # whose functions set no other's
                limited = limited or any(map(self.is_limit, map(find_timeout, given)))
            return known, limited, shape

        return read

    def message_reader(self, method: str) -> Reader:
        kind = SEND if method == "send" else RECEIVE

        def read(box: Box, group: Any, given: Any) -> tuple[Known, bool, Sequence[int]]:
            tensor = given[0][0]
            key = id(group), kind, tensor.dtype, *given[1:]
            known = box.known.get(key)
            if known is None:
                *peer, tag = map(operator.index, given[1:])
                tag = 0 if self.is_on_gpu(group, tensor) else tag  # which NCCL does not look at
                known = self.describe(
                    box, key, group, kind, kind, tensor.dtype, peer[0] if peer else None, tag
                )
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

    def watch_gpu(self, box: Box, group: Any) -> None:
        """A group that NCCL carries: its operations are in the streams of the GPU."""
        if self.queues is None:
            self.queues = Queues(self.stand)
            waits.append(self.queues.find_wait)
            record_also(self.queues.places)
        if not box.words[GPU]:
            self.queues.begin(box)
        self.on_gpu[id(group)] = all(each.type == "cuda" for each in group._device_types)

    def is_on_gpu(self, group: Any, given: Any) -> bool:
        """Whether NCCL carries what a group's operation is given."""
        is_for_all = self.on_gpu.get(id(group))
        if is_for_all is not False:
            return bool(is_for_all)
        while isinstance(given, list | tuple) and given:
            given = given[0]
        return isinstance(given, Tensor) and given.is_cuda

    def stand(
        self, name: str, batches: Sequence[int], real: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make a call in which the host waits for the end of these batches."""
        box = self.box
        if box is None or get_ident() != box.main_thread or not (batches and box.words[GPU]):
            return real(*args, **kwargs)
        key = HOST, name
        known = box.known.get(key) or box.describe(key, (HOST, name, (), "", None, 0, 0, ()))
        call = box.call(known, 3, False)
        box.put_in_queue(call, None, batches)
        thread = {threading.get_native_id()} if box.words[GPU] == Gpu.REAL else set[int]()
        spinning.update(thread)
        with self.main_thread_in(box, call):
            try:
                return real(*args, **kwargs)
            finally:
                spinning.difference_update(thread)
                box.end(call)

    def destroy(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The end of the world, or of a group."""
        is_of_world = not any((*args, *kwargs.values()))
        if self.queues and is_of_world and dist.is_initialized():
            return self.queues.destroy(real, *args, **kwargs)
        return real(*args, **kwargs)

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
                callbacks.discard(run)

        callbacks.add(run)
        return real(future, run)

    def new_group(
        self, real: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # it can be read only once, maybe
        ranks = ranks if ranks is None or isinstance(ranks, Sized) else [*ranks]
        box = self.box
        if box is None or not dist.is_initialized():
            return real(ranks, *args, **kwargs)
        call = inspect.signature(real).bind(ranks, *args, **kwargs).arguments
        world = ranks_of(dist.group.WORLD)
        members = world if ranks is None else tuple(sorted(map(int, ranks)))
        come = members if call.get("use_local_synchronization") else world
        limits = call.get("timeout"), default_store().timeout
        with self.inside(box, NEW_GROUP, come, members, limited=any(map(self.is_limit, limits))):
            group = real(ranks, *args, **kwargs)
        if isinstance(group, ProcessGroup):  # otherwise this rank is none of it
            self.read_group(group, is_new=True)
        return group

    def split_group(
        self, real: Callable[..., Any], parent: Any, ranks: Any, *args: Any, **kwargs: Any
    ) -> Any:
        box = self.box
        members = tuple(rank for number, rank in enumerate(ranks_of(parent)) if number in ranks)
        if box is None or dist.get_rank() not in members:
            return real(parent, ranks, *args, **kwargs)
        limits = *map(find_timeout, (*args, *kwargs.values())), default_store().timeout
        limited = any(map(self.is_limit, limits))
        with self.inside(box, SPLIT_GROUP, members, (), number_of(parent), limited):
            return real(parent, ranks, *args, **kwargs)

    def call_ddp(
        self, name: str, real: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record a method of `DistributedDataParallel` as a collective."""
        group = getattr(ddp, "process_group", None) or find_group(real, ddp, *args, **kwargs)
        if self.box is None or group is None:
            return real(ddp, *args, **kwargs)
        if name == MAKE_DDP:
            made = ranks_of(group), number_of(group)
            self.made[made] += 1
            self.models[ddp] = self.made[made]
        elif is_joining(ddp):  # a rank without batches makes these calls elsewhere
            return real(ddp, *args, **kwargs)
        with self.around(self.box, name, group, self.models.get(ddp, 0)):
            return real(ddp, *args, **kwargs)

    def forward(self, real: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass averages gradients once it has come to an output of such a forward pass,
        and then no more until the next: see `torch.nn.parallel.DistributedDataParallel`."""
        if self.box is None or torch.compiler.is_compiling():
            return real(ddp, *args, **kwargs)
        key, rebuilds = id(ddp), ddp.static_graph or not ddp.find_unused_parameters
        if rebuilds and not ddp._has_rebuilt_buckets:
            self.reducers[ddp.reducer] = ddp.process_group, self.models.get(ddp, 0)
        joins = is_joining(ddp)  # then others answer for a rank that has no batch left
        averages = ddp.require_backward_grad_sync and torch.is_grad_enabled() and not joins
        output = real(ddp, *args, **kwargs)
        if averages:
            self.forwarded[key] = ddp.process_group, self.models.get(ddp, 0)
            for node in {tensor.grad_fn for tensor in _find_tensors(output)} - {None}:
                node.register_prehook(lambda _: self.reach(key))
        return output

    def rebuild_buckets(self, real: Callable[..., Any], reducer: Any) -> Any:
        box, model = self.box, self.reducers.get(reducer)
        if box is None or model is None:
            return real(reducer)
        with self.around(box, BUCKETS, *model) as calls:
            if rebuilt := real(reducer):
                calls.clear()
        return rebuilt

    def backward(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        box = self.box
        forwarded = self.forwarded
        self.forwarded = {}  # those that forward again inside this pass
        if box is None or not forwarded:
            self.forwarded |= forwarded
            return real(*args, **kwargs)
        self.reached -= forwarded.keys()
        with contextlib.ExitStack() as passes:
            calls = {
                key: passes.enter_context(self.around(box, BACKWARD, *model))
                for key, model in forwarded.items()
            }
            outer = self.passes
            self.passes = calls
            try:
                return real(*args, **kwargs)
            finally:
                self.passes = outer
                for key in calls.keys() & self.reached:
                    calls[key].clear()
                    forwarded.pop(key)
                self.forwarded = forwarded | self.forwarded

    def reach(self, key: int) -> None:
        """A backward pass has come to an output of a model. If it may average the gradients of
        several, this is the one that the main thread is at."""
        self.reached.add(key)
        if self.box and key in self.passes and get_ident() == self.box.main_thread:
            [place] = self.passes[key]
            self.box.words[MAIN] = place

    @contextlib.contextmanager
    def around(self, box: Box, name: str, group: Any, model: int) -> Iterator[list[int]]:
        """Record a collective of the group's model of this number, as `inside`. Of a kind that may
        be none, the block clears the list if it was one."""
        key = id(group)
        self.read_group(group)
        with self.counted_apart(key):
            limited, may_be_none = key in self.limited, name in (BUCKETS, BACKWARD)
            with self.inside(
                box, name, ranks_of(group), (), number_of(group), limited, may_be_none, model
            ) as calls:
                call, queues = calls[0], self.queues if key in self.on_gpu else None
                if queues:
                    queues.add(box, call, (key, None), ends=False)
                yield calls
                if queues and not (may_be_none and calls):
                    queues.hold(call, (key, None))

    @contextlib.contextmanager
    def inside(
        self, box: Box, name: str, ranks: tuple[int, ...], members: tuple[int, ...],
        number: int = 0,
        limited: bool = False, may_be_none: bool = False, model: int = 0,
        place: str = "",
    ) -> Iterator[list[int]]:  # fmt: skip
        """Record a collective of these ranks that takes as long as this block, in which there may
        be others. If it `may_be_none`, it is taken back unless the block clears the list that it is
        in."""
        key = name, ranks, members, number, model
        known = box.known.get(key) or box.describe(
            key, (COLLECTIVE, name, ranks, place, None, model, number, members)
        )
        call = box.call(known, 4, limited)
        is_main, around = get_ident() == box.main_thread, box.around
        if is_main:
            box.around = box.words[MAIN] = call
        calls = [call]
        try:
            yield calls
        finally:
            if is_main:
                box.around = box.words[MAIN] = around
            box.end(call)
            if may_be_none and calls:
                box.take_back(call, known)


def storage_of(result: Any) -> int:
    """A number of the memory that a functional collective's result, or its wrapper, is in."""
    tensor: Any = getattr(result, "elem", result)
    return int(tensor.untyped_storage()._cdata)


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


def find_group(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The group of a model that is made by DistributedDataParallel with these arguments; None if
    they are wrong."""
    try:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    if mesh := given.get("device_mesh"):
        return mesh.get_group(0) if mesh.ndim == 1 else None
    return given.get("process_group") or dist.group.WORLD


hooks = Hooks()
os.register_at_fork(after_in_child=hooks.forget)
