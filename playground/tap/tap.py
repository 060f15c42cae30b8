"""The tap: it stands in the place of torch's methods, and tells observers and the recorder."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import ref

import torch
from torch.distributed import ProcessGroup, Work

from playground.base.upstream import WAITS, find_caller, list_groups
from playground.tap import native
from playground.tap.call import Call
from playground.tap.inside import Inside, ThreadState
from playground.tap.methods import MESSAGES, METHODS, by_position
from playground.tap.observer import FastObserver, Observer
from playground.tap.replacement import Replacement, Wrap, calling
from playground.tap.training import Training


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
        self.recorder: FastObserver | None = None
        self.all_observers: tuple[Observer, ...] = ()
        self.observers: tuple[Observer, ...] = ()
        """Those that look at calls."""
        self.one_at_a_time = threading.Lock()
        self.numbers = itertools.count()
        self.works: dict[int, UnderWay] = {}
        """By the id of the work, as long as the program has that."""
        self.under_way: set[UnderWay] = set()
        """Those that are not known to be over."""
        self.thread = ThreadState()
        self.inside = Inside(self.numbers, self.thread)
        self.training = Training()
        places: dict[str, Wrap] = {
            method: partial(self.wrap_operation, method) for method in METHODS
        }
        self.for_calls = [
            *(Replacement(ProcessGroup, *place) for place in places.items()),
            Replacement(Work, "wait", self.wrap_wait),
        ]
        """For the recorder, and for observers of calls."""
        self.for_ends = [
            Replacement(ProcessGroup, "_start_coalescing", calling(self.start_batch)),
            Replacement(ProcessGroup, "_end_coalescing", calling(self.end_batch)),
            Replacement(Work, "get_future", calling(self.get_future)),
            Replacement(Work, "is_completed", calling(self.poll)),
        ]
        """For observers of calls: what tells the ends of works, and which belong together."""
        self.for_inside: list[Replacement] = []
        """For observers that look inside; empty until the first of them comes."""
        self.for_passes = [Replacement(torch.autograd, "backward", calling(self.backward))]
        """For observers that look inside or at training."""
        self.for_recorder: list[Replacement] = []
        """The recorder's own: its `places`, and those of `record_also`."""
        self.installed: list[Replacement] = []

    def add(self, observer: Observer) -> None:
        with self.one_at_a_time:
            if observer.looks_inside and not self.for_inside:
                self.for_inside = self.inside.find_replacements()
            self.set_observers((*self.all_observers, observer))
            if observer.looks_inside:
                for group in list_groups():
                    self.inside.listen(group)

    def discard(self, observer: Observer) -> None:
        with self.one_at_a_time:
            for entry in list(self.under_way):
                # its callback has not run yet: the thread that runs callbacks is late
                if entry.future is not None and entry.future.done():
                    self.finish(entry)
            self.set_observers(tuple(each for each in self.all_observers if each is not observer))
            if not self.inside.observers:
                self.inside.stop_listening()
            if not self.observers:
                self.works.clear()
                self.under_way.clear()

    def set_observers(self, observers: tuple[Observer, ...]) -> None:
        """From now on, tell these."""
        self.all_observers = observers
        self.observers = tuple(each for each in observers if each.looks_at_calls)
        self.inside.observers = tuple(each for each in observers if each.looks_inside)
        self.inside.tells_ends = any(each.looks_at_ends for each in self.inside.observers)
        self.training.observers = tuple(each for each in observers if each.looks_at_training)
        self.put_in_place(self.wanted)

    def record(self, recorder: FastObserver | None) -> None:
        if recorder is self.recorder:
            return
        self.put_in_place([])  # what is in place has asked the one before
        self.recorder = recorder
        places = recorder.places if recorder else {}
        self.for_recorder = [Replacement(*place, wrap) for place, wrap in places.items()]
        self.put_in_place(self.wanted)

    @property
    def wanted(self) -> list[Replacement]:
        """What is to be in place for those that are told now."""
        calls = self.for_calls if self.recorder or self.observers else []
        ends = self.for_ends if self.observers else []
        within = self.for_inside if self.inside.observers else []
        passes = self.for_passes if self.inside.observers or self.training.observers else []
        trained = self.training.replacements if self.training.observers else []
        return [*calls, *self.for_recorder, *ends, *within, *passes, *trained]

    def put_in_place(self, wanted: list[Replacement]) -> None:
        for each in self.installed:
            if each not in wanted:
                each.remove()
        for each in wanted:
            if each not in self.installed:
                each.install()
        self.installed = wanted

    def leave(self) -> None:
        """This process has been forked from the rank: it is recorded no more."""
        self.one_at_a_time = threading.Lock()
        self.record(None)

    def wrap_operation(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of a method of `ProcessGroup`."""
        recorded = (self.recorder or FastObserver()).wrap_operation(method, real)

        @wraps(real)
        def operation(group: Any, *args: Any, **kwargs: Any) -> Any:
            given = by_position(method, args, kwargs) if kwargs else args
            if not self.observers or given is None:
                return recorded(group, given, args, kwargs)
            # newer versions of torch say in the options whether a call blocks
            waits = bool(given) and not getattr(given[-1], "asyncOp", True)
            blocks, by_torch = WAITS if waits else find_caller(method in MESSAGES)
            call = Call(
                next(self.numbers), method, group, given,
                blocks=blocks or by_torch, is_torchs=by_torch,
            )  # fmt: skip
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
            batch = self.thread.batch
            if batch is not None:
                batch.append(call)
            elif work is None:
                for each in self.observers:
                    each.done([call])
            else:
                self.follow(work, [call], may_be_dropped=not blocks)
                if by_torch:
                    work.get_future()
                if self.inside.tells_ends and not blocks and method not in MESSAGES:
                    native.call_when_done(work, partial(self.inside.complete, call))
            return work

        return operation

    def follow(self, work: Any, calls: list[Call], may_be_dropped: bool = True) -> None:
        """These calls go on in this work."""
        key = id(work)
        entry = UnderWay(calls, ref(work, (lambda _: self.forget(key)) if may_be_dropped else None))
        self.works[key] = entry
        self.under_way.add(entry)
        for call in calls:
            call.work = entry.work

    def finish(self, entry: UnderWay) -> None:
        """These calls are over, unless that has been told."""
        try:
            self.under_way.remove(entry)
        except KeyError:
            return
        for each in self.observers:
            each.done(entry.calls)

    def forget(self, key: int) -> None:
        """A work is gone."""
        entry = self.works.pop(key, None)
        if entry is not None and entry.future is None and entry in self.under_way:
            self.under_way.discard(entry)
            for each in self.observers:
                each.dropped(entry.calls)

    def wrap_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of `Work.wait`."""
        recorded = (self.recorder or FastObserver()).wrap_wait(real)

        @wraps(real)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry = self.works.get(id(work))
            if entry is None or not (entry in self.under_way or self.inside.observers):
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
        if call.is_torchs:
            return self.inside.observers
        if call.blocks:
            return ()
        return self.observers if entry in self.under_way else self.inside.observers

    def get_future(self, real: Callable[..., Any], work: Any) -> Any:
        future = real(work)
        entry = self.works.get(id(work))
        for call in entry.calls if entry else ():
            call.has_future = True
        if entry is not None and entry.future is None and entry in self.under_way:
            entry.future = future
            future.add_done_callback(lambda _: self.finish(entry))
        if entry is not None and self.inside.observers:
            self.inside.follow_future(future, entry.calls)
        return future

    def poll(self, real: Callable[..., Any], work: Any) -> Any:
        entry = self.works.get(id(work))
        for call in entry.calls if entry else ():
            call.is_polled = True
        return real(work)

    def start_batch(self, real: Callable[..., Any], *args: Any) -> None:
        self.thread.batch = []
        real(*args)

    def end_batch(self, real: Callable[..., Any], *args: Any) -> Any:
        batch = self.thread.batch
        self.thread.batch = None
        work = real(*args)
        if batch and work is not None:
            self.follow(work, batch)
        elif batch:
            for each in self.observers:
                each.done(batch)
        return work

    def backward(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observers = tuple(
            each for each in self.all_observers if each.looks_inside or each.looks_at_training
        )
        for each in observers:
            each.backward_begun(args[0] if args else kwargs.get("tensors"))
        try:
            return real(*args, **kwargs)
        finally:
            for each in observers:
                each.backward_ended()


_tap = Tap()
os.register_at_fork(after_in_child=_tap.leave)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell this observer in this block."""
    _tap.add(observer)
    try:
        yield
    finally:
        _tap.discard(observer)


def record(recorder: FastObserver) -> None:
    """From now on, tell this recorder."""
    with _tap.one_at_a_time:
        _tap.record(recorder)


def record_also(places: Mapping[tuple[Any, str], Wrap]) -> None:
    """Have the recorder replace further functions, as of a module that is imported by now."""
    with _tap.one_at_a_time:
        _tap.for_recorder += [Replacement(*place, wrap) for place, wrap in places.items()]
        _tap.put_in_place(_tap.wanted)
