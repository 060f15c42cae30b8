"""What torch does by itself: its calls in C++, and its waits for work that it keeps to itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from playground.base.upstream import hide_from_compiler
from playground.tap import native
from playground.tap.call import Call
from playground.tap.methods import ROOT_AT
from playground.tap.observer import Observer
from playground.tap.replacement import Replacement, calling


class ThreadState(threading.local):
    """What the tap knows of a thread."""

    batch: list[Call] | None = None
    """The calls of the batch that it is starting, if the backend makes one work of them."""
    in_call = False
    """Whether it is in an operation that Python has called."""


class Inside:
    """Tells observers that look inside."""

    def __init__(self, numbers: Iterator[int], thread: ThreadState) -> None:
        """Both are the tap's: its numbers of calls, and what it knows of each thread."""
        self.numbers = numbers
        self.thread = thread
        self.observers: tuple[Observer, ...] = ()
        self.tells_ends = False
        """Whether an observer needs `completed` of the calls of Python's."""
        self.listened_to: WeakSet[Any] = WeakSet()
        """Process groups whose hooks tell of calls in C++."""
        self.in_cpp: dict[tuple[int, int], Call] = {}
        """Calls that C++ is making, by the group's id and the number that its hooks have for it."""
        self.functional: dict[int, Call] = {}
        """Those that `wait_tensor` will wait for, by where the tensor lies."""
        self.futures: dict[int, tuple[Any, list[Call]]] = {}
        """The calls of a work by the id of its future, as long as the program has that."""

    def find_replacements(self) -> list[Replacement]:
        """What is to be in place as long as there is an observer."""
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
        method = native.METHOD_OF_HOOK.get(hook.name.name)
        group = known()
        if self.thread.in_call or method is None or group is None:
            return
        args = native.arguments(method, hook, ROOT_AT.get(method))
        call = Call(next(self.numbers), method, group, args, blocks=False, in_cpp=True)
        call.is_functional = native.is_functional()
        self.in_cpp[id(known), hook.op_id] = call
        for each in self.observers:
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
        for each in self.observers:
            each.returned(call)
        if hook.work is None or not native.call_when_done(hook.work, partial(self.complete, call)):
            self.complete(call)

    def complete(self, call: Call) -> None:
        for each in self.observers:
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

    def wait_future(self, real: Callable[..., Any], future: Any) -> Any:
        """Who waits for the future of a work waits for the work."""
        _, calls = self.futures.pop(id(future), (None, []))
        with self.waited_for(calls):
            return real(future)

    def follow_future(self, future: Any, calls: list[Call]) -> None:
        """The program has the future of a work."""
        key = id(future)
        self.futures[key] = ref(future, lambda _: self.futures.pop(key, None)), calls

    @contextlib.contextmanager
    def waited_for(self, calls: list[Call]) -> Iterator[None]:
        """In this block the program waits for these calls: tell who looks inside."""
        observers = self.observers if calls else ()
        for each in observers:
            each.waiting(calls)
        try:
            yield
        finally:
            for each in observers:
                each.waited(calls)
