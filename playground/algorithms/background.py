"""`async_op`: a collective that goes on while its caller does something else.

The backend's own works in threads of the backend. Ours is Python, so it has a Python thread: one, in which calls take
their turns. Two at once would take each other's messages, and on every rank their order must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collective")
_last: Future[None] | None = None
"""The latest call in the thread, until somebody has waited for it."""


class Work:
    """The handle of an asynchronous call, as `dist.all_reduce` returns it."""

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> bool:
        """Wait until it is done. Raises whatever the call raised."""
        self.future.result()
        return True

    def is_completed(self) -> bool:
        return self.future.done()


def start(call: Callable[[], None], in_thread: bool) -> Work:
    """Begin `call` after all that was started before.

    Where the backend does not allow a second thread (nccl), the call itself only queues work for the GPU, and returns
    before that is done: it is made here and now. In either case what it raises is raised by `wait`.
    """
    global _last
    if in_thread:
        _last = _thread.submit(call)
        return Work(_last)
    done: Future[None] = Future()
    try:
        call()
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)
    return Work(done)


def finish() -> None:
    """Wait until nothing that was started is under way."""
    global _last
    if last := _last:  # asked first, as every synchronous collective comes by here
        wait([last])
        _last = None if _last is last else _last
