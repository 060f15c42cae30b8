"""Records our own collectives: from call to end, the phases in them, and the additions of chunks. (Their messages are
recorded as all others are: see distributed.py.)"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from playground.algorithms import messages
from playground.algorithms.all_reduce import current_phase
from playground.algorithms.messages import Addressed, Executor, Group, Works
from playground.runtime.tap import ranks_of
from playground.see.record import COLLECTIVE, COMPUTE, PHASE
from playground.see.record.distributed import CallRecorder, bytes_of, values_of
from playground.see.record.layout import MAX_VALUES
from playground.see.record.recorder import Recorder

EXCHANGE = messages.exchange.__code__


class RecordingExecutor(Executor):
    """Records what it does. Within a collective, only what it starts itself is recorded of torch.distributed."""

    def __init__(self, recorder: Recorder, calls: CallRecorder) -> None:
        self.recorder, self.calls = recorder, calls

    def collective(
        self, name: str, call: Callable[[], None], input: torch.Tensor, output: torch.Tensor, group: Group,
        async_op: bool,
    ) -> Any:  # fmt: skip
        """Record the collective from the call until it is done."""
        where = {"source": self.recorder.sources.find(), "parent": self.recorder.around()}
        number = self.recorder.begin(COLLECTIVE, name, bytes_of(input), input.shape, ranks_of(group), **where)
        whole = functools.partial(self.run_whole, number, call, output, async_op)
        work = super().collective(name, whole, input, output, group, async_op)
        return None if work is None else RecordedWork(self.recorder, work, number)

    def run_whole(self, number: int, call: Callable[[], None], output: torch.Tensor, async_op: bool) -> None:
        """Run the collective, in this thread."""
        recorder, thread = self.recorder, self.recorder.thread
        recorder.open(number)
        if async_op:
            recorder.set_lane(number, thread.lane)
        thread.is_inside = True
        try:
            call()
        finally:
            thread.is_inside = False
            recorder.close(number)
            thread.flat, thread.phase = None, ""
        recorder.put_values(number, values_of(output))

    def run(self, algorithm: Callable[..., None], flat: torch.Tensor, *arguments: Any) -> None:
        self.recorder.thread.flat = flat
        self.calls.note_values()
        super().run(algorithm, flat, *arguments)

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        """Start messages, and begin the phase that they are the first of."""
        recorder, thread = self.recorder, self.recorder.thread
        if (phase := current_phase(group)) != thread.phase:
            if thread.phase:
                recorder.close(thread.phase_number)
            thread.phase = phase
            if phase:
                thread.phase_number = recorder.open(recorder.begin(PHASE, phase))
        was_inside, thread.is_inside, thread.source = thread.is_inside, False, recorder.sources.find(3)
        try:
            return RecordedWorks(self.calls, super().start(group, send, receive), thread.source)
        finally:
            thread.is_inside, thread.source = was_inside, None

    def add(self, mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
        """Record the addition."""
        recorder, offset = self.recorder, self.calls.offset_of(mine)
        source = recorder.sources.find()
        number = recorder.begin(COMPUTE, "add", mine.nbytes, mine.shape, offset=offset, source=source)
        super().add(mine, theirs, op)
        recorder.end(number)
        if mine.numel() <= MAX_VALUES:
            recorder.put_values(number, values_of(mine))
            self.calls.note_values()


class RecordedWorks(Works):
    """Messages under way: the program waits for all that are to be received, and for all that are sent."""

    def __init__(self, calls: CallRecorder, works: Works, source: int) -> None:
        super().__init__(works.sends, works.receives)
        self.calls, self.source = calls, source

    def received(self) -> None:
        self.calls.wait_for(self.receives, super().received, self.find_source())
        if self.receives:
            self.calls.note_values()

    def sent(self) -> None:
        self.calls.wait_for(self.sends, super().sent, self.find_source())

    def find_source(self) -> int:
        """The line that waits; inside `exchange`, as it is the same, the one that started the messages."""
        return self.source if sys._getframe(2).f_code is EXCHANGE else self.calls.recorder.sources.find(3)


class RecordedWork:
    """The work of a collective of ours, which records its own end: that may be long before a wait for it."""

    def __init__(self, recorder: Recorder, work: Any, number: int) -> None:
        self.recorder, self.work = recorder, work
        self.number: int | None = number
        """The number of the collective's event, until the first wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self) -> Any:
        number, self.number = self.number, None
        if number is None:
            return self.work.wait()
        wait = self.recorder.begin_wait([number], self.recorder.sources.find())
        try:
            return self.work.wait()
        finally:
            self.recorder.end(wait)
