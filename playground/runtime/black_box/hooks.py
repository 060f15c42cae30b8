"""In a rank: operations write to its black box.

Functions of its own are in the place of the methods that the tap is in the place of, as short as can be: a rank calls
them all the time. DistributedDataParallel averages in C++, where no method of Python's is called: its backward pass
counts as one collective.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from playground.runtime.black_box import BACKWARD, BUFFERS, COLLECTIVE, MAKE_DDP, NEW_GROUP, RECEIVE, SEND
from playground.runtime.black_box.activity import callbacks
from playground.runtime.black_box.box import MAIN, MAY_GIVE_UP, Box, Known
from playground.runtime.tap import MESSAGES, METHODS, ROOTED, number_of, ranks_of
from playground.runtime.tap.replacement import Replacement

LIMITED = "barrier", "monitored_barrier"
"""Collectives that may be given a timeout of their own."""
ZERO = timedelta(0)


class Hooks:
    """Operations of this process write to `box`, if there is one."""

    def __init__(self) -> None:
        self.box: Box | None = None
        self.timeout = ZERO
        """The world's, which ends before any longer one does."""
        self.limited: set[int] = set()
        """Ids of the groups whose operations have a time limit of the program's choice."""
        self.works: dict[int, int] = {}
        """Numbers of operations by the id of their work. (An id is used again: then it is the later one's.)"""
        self.forwarded: dict[int, Any] = {}
        """Models whose gradients the next backward pass averages, by id."""
        wraps: dict[tuple[Any, str], Callable[[Any], Any]] = {
            (ProcessGroup, method): functools.partial(
                self.wrap_message if method in MESSAGES else self.wrap_collective, method
            )
            for method in METHODS
        }
        wraps |= {
            (Work, "wait"): self.wrap_wait,
            (torch.Future, "then"): self.wrap_then,
            (torch.Future, "add_done_callback"): self.wrap_then,
            (DistributedDataParallel, "__init__"): functools.partial(self.wrap_ddp, MAKE_DDP),
            (DistributedDataParallel, "_sync_buffers"): functools.partial(self.wrap_ddp, BUFFERS),
            (DistributedDataParallel, "forward"): self.wrap_forward,
            (torch.autograd, "backward"): self.wrap_backward,
            (distributed_c10d, "_new_group_with_tag"): self.wrap_new_group,
        }
        self.replacements = [Replacement(*place, wrap) for place, wrap in wraps.items()]
        self.installed = False

    def begin_program(self, box: Box, timeout: timedelta) -> None:
        """From now on, operations write to `box`. `timeout` is the world's."""
        if not self.installed:
            self.installed = True
            for each in self.replacements:
                each.install()
        box.begin_program()
        self.timeout = timeout
        for kept in (self.limited, self.works, self.forwarded):
            kept.clear()
        self.box = box

    def begin_world(self, timeout: timedelta | None) -> None:
        """The program has formed a world of its own, with this timeout if it is not None."""
        if self.box:
            self.box.begin_world(dist.get_rank())
        self.meet_group(dist.group.WORLD, timeout)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations write nowhere in this block, whose time is taken: to write takes some microseconds for each. All
        ranks must pause at the same point."""
        box, self.box = self.box, None
        try:
            yield
        finally:
            self.box = box

    def end_program(self) -> None:
        """The program has returned. Its threads may go on."""
        if self.box:
            self.box.end_program()

    def forget(self) -> None:
        """Operations write nowhere: this process has been forked from the rank."""
        self.box = None
        if self.installed:
            self.installed = False
            for each in self.replacements:
                each.remove()

    def is_limit(self, timeout: timedelta | None) -> bool:
        """Whether a timeout that the program has chosen ends before the world's, so that the program may go on."""
        return timeout is not None and ZERO < timeout < self.timeout

    def meet_group(self, group: Any, timeout: timedelta | None) -> None:
        """The program has made a process group, and chosen this timeout if it is not None."""
        if self.box:
            self.box.known.clear()  # it has ids of groups, and those of groups that are gone are used again
        (self.limited.add if self.is_limit(timeout) else self.limited.discard)(id(group))

    def wrap_collective(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        name, given, got = METHODS[method]
        at = (got if name in ("scatter", "reduce_scatter") else given) or 0  # the one that all ranks have
        has_root, has_limit = name in ROOTED, name in LIMITED

        @functools.wraps(real)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            box = self.box
            if box is None:
                return real(group, *args, **kwargs)
            tensor = args[at] if len(args) > at else None
            while type(tensor) is list or type(tensor) is tuple:  # of tensors, or of lists of them
                tensor = tensor[0] if len(tensor) == 1 else None
            shape, dtype = (tensor.shape, tensor.dtype) if isinstance(tensor, torch.Tensor) else ((), "")
            root = args[-1].rootRank if has_root and hasattr(args[-1], "rootRank") else None
            key = id(group), name, dtype, root
            known = box.known.get(key)
            if known is None:
                ranks = ranks_of(group)
                peer = None if root is None else dict(enumerate(ranks)).get(root)  # torch refuses one that is none
                known = box.describe(key, (COLLECTIVE, name, ranks, dtype, peer, 0, number_of(group), ()))
            limited = id(group) in self.limited or (has_limit and self.is_limit(find_timeout(*args, *kwargs.values())))
            return self.follow(box, known, limited, shape, real, group, *args, **kwargs)

        return collective

    def wrap_message(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        kind, from_anyone = SEND if method == "send" else RECEIVE, method == "recv_anysource"

        @functools.wraps(real)
        def message(group: Any, tensors: Sequence[torch.Tensor], *place: int) -> Any:
            box = self.box
            if box is None:
                return real(group, tensors, *place)
            tensor = tensors[0]
            key = id(group), kind, tensor.dtype, *place
            known = box.known.get(key)
            if known is None:
                ranks = ranks_of(group)
                peer = None if from_anyone else dict(enumerate(ranks)).get(place[0])
                known = box.describe(key, (kind, kind, ranks, tensor.dtype, peer, place[-1], number_of(group), ()))
            return self.follow(box, known, id(group) in self.limited, tensor.shape, real, group, tensors, *place)

        return message

    def follow(
        self, box: Box, known: Known, limited: bool, shape: Sequence[int], real: Callable[..., Any], *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Make the call. What it returns is a work, or the operation is over; if it raises, there was none."""
        number = box.call(known, 4, limited, shape)
        is_main, words = threading.get_ident() == box.main_thread, box.words
        if is_main:
            words[MAIN] = number
        try:
            work = real(*args, **kwargs)
        except BaseException:
            box.take_back(number, known)
            raise
        finally:
            if is_main:
                words[MAIN] = box.around
        if work is None:
            box.end(number)
        else:
            self.works[id(work)] = number
        return work

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def wait(work: Any, timeout: timedelta = ZERO) -> Any:
            box, number = self.box, self.works.pop(id(work), None)
            if box is None or number is None:
                return real(work, timeout)
            is_main, words = threading.get_ident() == box.main_thread, box.words
            if self.is_limit(timeout):
                box.end(number, MAY_GIVE_UP)
            if is_main:
                words[MAIN] = number
            try:
                return real(work, timeout)
            finally:
                if is_main:
                    words[MAIN] = box.around
                box.end(number)

        return wait

    def wrap_then(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Know of a future's callback as long as it has not run."""

        @functools.wraps(real)
        def then(future: Any, callback: Callable[[Any], Any]) -> Any:
            def run(done: Any) -> Any:
                try:
                    return callback(done)
                finally:
                    callbacks.discard(run)

            callbacks.add(run)
            return real(future, run)

        return then

    def wrap_new_group(self, real: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(real)

        @functools.wraps(real)
        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            ranks = ranks if ranks is None or isinstance(ranks, Sized) else [*ranks]  # it can be read only once, maybe
            box = self.box
            if box is None or not dist.is_initialized():
                return real(ranks, *args, **kwargs)
            call = parameters.bind(ranks, *args, **kwargs).arguments
            world = ranks_of(dist.group.WORLD)
            members = world if ranks is None else tuple(sorted(map(int, ranks)))
            come = members if call.get("use_local_synchronization") else world
            with self.inside(box, NEW_GROUP, come, members):
                group = real(ranks, *args, **kwargs)
            self.meet_group(group, call.get("timeout"))
            return group

        return new_group

    def wrap_ddp(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record a method of `DistributedDataParallel` as a collective."""

        @functools.wraps(real)
        def method(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            group = getattr(ddp, "process_group", None) or kwargs.get("process_group") or dist.group.WORLD
            if self.box is None or group is None:
                return real(ddp, *args, **kwargs)
            with self.inside(self.box, name, ranks_of(group), number=number_of(group)):
                return real(ddp, *args, **kwargs)

        return method

    def wrap_forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            joins = ddp._join_config.enable  # then others answer for a rank that has no batch left
            if ddp.require_backward_grad_sync and torch.is_grad_enabled() and ddp.training and not joins:
                self.forwarded[id(ddp)] = ddp.process_group
            return real(ddp, *args, **kwargs)

        return forward

    def wrap_backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def backward(*args: Any, **kwargs: Any) -> Any:
            box, groups = self.box, list(self.forwarded.values())
            self.forwarded.clear()
            if box is None or not groups:
                return real(*args, **kwargs)
            with contextlib.ExitStack() as passes:
                for group in groups:
                    passes.enter_context(self.inside(box, BACKWARD, ranks_of(group), number=number_of(group)))
                return real(*args, **kwargs)

        return backward

    @contextlib.contextmanager
    def inside(
        self, box: Box, name: str, ranks: tuple[int, ...], members: tuple[int, ...] = (), number: int = 0
    ) -> Iterator[None]:
        """Record a collective of these ranks that takes as long as this block, in which there may be others."""
        key = name, ranks, members, number
        known = box.known.get(key) or box.describe(key, (COLLECTIVE, name, ranks, "", None, 0, number, members))
        call = box.call(known, 4, False)
        is_main, around = threading.get_ident() == box.main_thread, box.around
        if is_main:
            box.around = box.words[MAIN] = call
        try:
            yield
        finally:
            if is_main:
                box.around = box.words[MAIN] = around
            box.end(call)


def find_timeout(*args: Any) -> timedelta | None:
    """The timeout of a barrier: the first argument, or in it; below 0 if the program has given none."""
    return next((getattr(each, "timeout", each) for each in args), None)


hooks = Hooks()
os.register_at_fork(after_in_child=hooks.forget)
