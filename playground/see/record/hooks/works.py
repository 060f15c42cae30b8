"""What a call returns that goes on in the background: the same as ever, but to wait for it is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from playground.see.record.hooks.tensors import values_of_all
from playground.see.record.recorder import Recorder

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
Pending = tuple[int, Sequence[torch.Tensor]]
"""The number of an event that is under way, and the tensors that will have what came of it."""


def finish(recorder: Recorder, pending: Sequence[Pending]) -> None:
    """These are over, now."""
    recorder.end_all([number for number, _ in pending])
    for number, tensors in pending:
        recorder.put_values(number, values_of_all(tensors))


class IssuedWorks:
    """Works for which torch waits by itself. They are over when their futures are done."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.issued: dict[Any, Pending] = {}
        """What is not known to be over, by its future."""

    def add(self, work: Any, pending: Pending) -> None:
        future = work.get_future()
        self.issued[future] = pending
        future.add_done_callback(lambda _: self.finish(future))

    def finish(self, future: Any) -> None:
        """It is over, now, unless that was known before."""
        pending = self.issued.pop(future, None)
        if pending is not None:
            finish(self.recorder, [pending])

    def finish_done(self) -> None:
        """What is done is over: the thread that is to tell of it, in the callback, may come to it much later."""
        for future in list(self.issued):
            if future.done():
                self.finish(future)


def is_of_torch(caller: FrameType) -> bool:
    """Whether it is a function of torch's that calls."""
    return caller.f_code.co_filename.startswith(TORCH)


class RecordedWork:
    """Stands for a `Work` of torch's or of ours."""

    def __init__(self, recorder: Recorder, work: Any, pending: Sequence[Pending]) -> None:
        self.recorder, self.work, self.pending = recorder, work, pending
        self.when_done: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def __del__(self) -> None:
        """Nobody can wait for it any more."""
        if self.pending and self.work.is_completed():
            self.finish()

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pending:
            return self.work.wait(*args, **kwargs)
        recorder = self.recorder
        wait = recorder.begin_wait([number for number, _ in self.pending], recorder.sources.find())
        try:
            result = self.work.wait(*args, **kwargs)
        finally:
            recorder.end(wait)
        self.finish()
        return result

    def get_future(self) -> Any:
        """Whoever has the future need not wait for the work."""
        future = self.work.get_future()
        future.add_done_callback(lambda _: self.finish())
        return future

    def finish(self) -> None:
        pending, self.pending = self.pending, ()
        self.when_done()
        finish(self.recorder, pending)
