"""`async_op`: a collective that goes on while its caller does something else.

The backend's own works in threads of the backend. Ours is Python, so it has Python threads. The calls of one group are
made one at a time, in their order, which must be the same on all its ranks: two at once would take each other's
messages. Those of different groups do not wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

Finish = Callable[[BaseException | None], object]
"""Is called when a call has ended, with what it raised. Callbacks of the program's may run in it."""


class Work:
    """The handle of an asynchronous call, as `dist.all_reduce` returns it."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def finish(self, error: BaseException | None) -> None:
        if error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def wait(self) -> bool:
        """Wait until it is done. Raises whatever the call raised."""
        self.future.result()
        return True

    def is_completed(self) -> bool:
        return self.future.done()


class Entry(NamedTuple):
    """A call that is to be made when the one before it has been, which `before` and `made` tell."""

    before: threading.Event
    call: Callable[[], object]
    made: threading.Event
    finish: Finish


class Calls:
    """The calls of one group."""

    def __init__(self) -> None:
        self.entries: SimpleQueue[Entry | None] = SimpleQueue()
        self.last = threading.Event()
        """Set when the latest asynchronous call has been made."""
        self.last.set()
        self.lock = threading.Lock()
        self.threads: set[int] = set()
        self.finishing: set[int] = set()
        """The threads that run callbacks."""

    def run(self, call: Callable[[], object]) -> None:
        """Make a call here and now, after all that were started before."""
        if not self.last.is_set():
            self.last.wait()
        call()

    def start(self, call: Callable[[], object], finish: Finish) -> None:
        """Have a call made in a thread, after all that were started before."""
        with self.lock:
            before, self.last = self.last, threading.Event()
            self.entries.put(Entry(before, call, self.last, finish))
        self.provide_thread()

    def provide_thread(self) -> None:
        """Start a thread if calls are waiting and all threads are in callbacks, which may wait for these very calls."""
        if len(self.finishing) >= len(self.threads) and not self.entries.empty():
            threading.Thread(target=self.work, name="collective", daemon=True).start()  # no rank's end waits for it

    def work(self) -> None:
        """Make calls until there are to be no more."""
        self.threads.add(me := threading.get_ident())
        while entry := self.entries.get():
            error = None
            try:
                entry.before.wait()
                entry.call()
            except BaseException as raised:  # to be raised where it is waited for
                error = raised
            entry.made.set()
            self.finishing.add(me)
            self.provide_thread()
            with contextlib.suppress(Exception):  # of a callback: torch has logged it
                entry.finish(error)
            self.finishing.discard(me)
            del entry, error  # which hold tensors, and the group
        self.entries.put(None)  # for the next thread

    def end(self) -> None:
        """Let the threads go: nothing is started any more."""
        self.entries.put(None)


_calls: weakref.WeakKeyDictionary[Any, Calls] = weakref.WeakKeyDictionary()


def calls_of(group: Any) -> Calls:
    """The calls of this process group, as long as it exists."""
    calls = _calls.get(group)
    if calls is None:
        calls = _calls[group] = Calls()
        weakref.finalize(group, calls.end)
    return calls


def start(calls: Calls, call: Callable[[], object], in_thread: bool) -> Work:
    """Begin `call` after all that was started before.

    Where the backend does not allow a second thread (nccl), the call itself only queues work for the GPU, and returns
    before that is done: it is made here and now. In either case what it raises is raised by `wait`.
    """
    work = Work()
    if in_thread:
        calls.start(call, work.finish)
        return work
    try:
        call()
        work.finish(None)
    except Exception as error:
        work.finish(error)
    return work
