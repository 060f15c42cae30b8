"""`async_op`: a collective that goes on while its caller does something else.

The backend's own works in threads of the backend. Ours is Python, so it has Python threads. The
calls of one group are made one at a time, in their order, which must be the same on all its ranks:
two at once would take each other's messages. Those of different groups do not wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Finish = Callable[[BaseException | None], object]
"""Is called when a call has ended, with what it raised. Callbacks of the program's may run in
it."""


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


def attempt(call: Callable[[], object]) -> BaseException | None:
    """Make this call. Returns its error, which is to be raised where it is waited for: but raises
    those of signals."""
    try:
        call()
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not isinstance(error, Exception):
            raise
        return error
    return None


class Calls:
    """The calls of one group."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[tuple[Callable[[], object], Finish] | None] = SimpleQueue()
        """Calls to make, in order; None lets the threads go: nothing is started any more."""
        self.started = self.made = self.free = 0
        """How many asynchronous calls there were, how many of them have been made, and the threads
        in no callback."""
        self.change, self.turn = threading.Condition(), threading.Lock()

    def run(self, call: Callable[[], object]) -> None:
        """Make a call here and now, after all that were started before."""
        if self.made < (number := self.started):
            with self.change:
                self.change.wait_for(lambda: self.made >= number)
        call()

    def start(self, call: Callable[[], object], finish: Finish) -> None:
        """Have a call made in a thread, after all that were started before."""
        with self.change:
            self.waiting.put((call, finish))
            self.started += 1
            self.provide_thread()

    def provide_thread(self) -> None:
        """Start a thread if calls are waiting and all threads are in callbacks, which may wait for
        these very calls."""
        if not self.free and self.made < self.started:
            # no rank's end waits for it
            threading.Thread(target=self.work, name="collective", daemon=True).start()
            self.free += 1

    def work(self) -> None:
        """Make calls until there are to be no more."""
        while True:
            with self.turn:
                if not (entry := self.waiting.get()):
                    break
                call, finish = entry
                error = attempt(call)
                with self.change:
                    self.made = self.made + 1
                    self.free = self.free - 1
                    self.change.notify_all()
                    self.provide_thread()
            with contextlib.suppress(Exception):  # of a callback: torch has logged it
                finish(error)
            del entry, call, finish, error  # which hold tensors, and the group
            with self.change:
                self.free += 1
        self.waiting.put(None)  # for the next thread


_calls: weakref.WeakKeyDictionary[Any, Calls] = weakref.WeakKeyDictionary()


def calls_of(group: Any) -> Calls:
    """The calls of this process group, as long as it exists."""
    if not (calls := _calls.get(group)):
        calls = _calls[group] = Calls()
        weakref.finalize(group, calls.waiting.put, None)
    return calls


def start(calls: Calls, call: Callable[[], object], in_thread: bool) -> Work:
    """Begin `call` after all that was started before.

    Where the backend does not allow a second thread (nccl), the call itself only queues work for
    the GPU, and returns before that is done: it is made here and now. In either case what it raises
    is raised by `wait`.
    """
    work = Work()
    if in_thread:
        calls.start(call, work.finish)
    else:
        work.finish(attempt(call))
    return work
