"""Records our own collectives: from call to end, their messages and waits, and the additions of chunks."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from playground.algorithms import messages
from playground.algorithms.all_reduce import current_phase
from playground.algorithms.messages import TAG, Addressed, Executor, Group, Subset, Works, is_batched, number_in_whole
from playground.runtime.tap import ranks_of
from playground.see.record import COLLECTIVE, COMPUTE, PHASE, RECEIVE, SEND, VALUES
from playground.see.record.distributed import GroupCounts, bytes_of, values_of
from playground.see.record.layout import MAX_VALUES, NONE
from playground.see.record.recorder import Recorder

EXCHANGE = messages.exchange.__code__


class Running(threading.local):
    """The collective that this thread is running."""

    flat: torch.Tensor | None = None
    phase = ""
    phase_number = NONE


class RecordingExecutor(Executor):
    """Records what it does. Within a collective, what torch.distributed is called for is not recorded again."""

    def __init__(self, recorder: Recorder, counts: GroupCounts) -> None:
        self.recorder, self.counts, self.running = recorder, counts, Running()

    def collective(
        self, name: str, call: Callable[[], None], input: torch.Tensor, output: torch.Tensor, group: Group,
        async_op: bool,
    ) -> Any:  # fmt: skip
        """Record the collective from the call until it is done."""
        ranks, source = ranks_of(group), self.recorder.sources.find()
        number = self.recorder.begin(COLLECTIVE, name, bytes_of(input), input.shape, ranks, source=source)
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
            self.running.flat, self.running.phase = None, ""
        recorder.put_values(number, values_of(output))

    def run(self, algorithm: Callable[..., None], flat: torch.Tensor, *arguments: Any) -> None:
        self.running.flat = flat
        self.note_values()
        super().run(algorithm, flat, *arguments)

    def offset_of(self, part: torch.Tensor) -> int:
        """The first element of this part of the collective's tensor; -1 if it is not part of it."""
        flat = self.running.flat
        assert flat is not None
        behind = part.data_ptr() - flat.data_ptr()
        return behind // flat.element_size() if 0 <= behind < flat.nbytes else NONE

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        """Start messages, and record that while they are under way."""
        recorder, running = self.recorder, self.running
        if (phase := current_phase(group)) != running.phase:
            if running.phase:
                recorder.close(running.phase_number)
            running.phase = phase
            if phase:
                running.phase_number = recorder.open(recorder.begin(PHASE, phase))
        if isinstance(group, Subset):
            group, send, receive = group.whole, number_in_whole(group, send), number_in_whole(group, receive)
        now = recorder.clock()
        works = super().start(group, send, receive)
        ranks, source = ranks_of(group), recorder.sources.find(3)
        counts = self.counts[ranks, TAG]

        def begin(kind: str, name: str, tensor: torch.Tensor, peer: int) -> int:
            message, offset = next(counts[kind, ranks[peer]]), self.offset_of(tensor)
            about = (ranks, ranks[peer], message, TAG, offset, source, now)
            return recorder.begin(kind, name, tensor.nbytes, tensor.shape, *about)

        sends = [begin(SEND, "isend", tensor, peer) for tensor, peer in send]
        receives = [begin(RECEIVE, "irecv", tensor, peer) for tensor, peer in receive]
        self.put_values(sends, send)
        together = is_batched((send or receive)[0][0])
        return RecordedWorks(self, works, sends, receives, receive, source, together)

    def put_values(self, numbers: Sequence[int], messages: Sequence[Addressed]) -> None:
        """Record the values of these messages, if they are small."""
        for number, (tensor, _) in zip(numbers, messages, strict=True):
            if tensor.numel() <= MAX_VALUES:
                self.recorder.put_values(number, values_of(tensor))

    def note_values(self) -> None:
        """Record the values that the rank now holds."""
        flat = self.running.flat
        if flat is not None and flat.numel() <= MAX_VALUES:
            self.recorder.instant(VALUES, "holds", values_of(flat), shape=flat.shape)

    def add(self, mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
        """Record the addition."""
        recorder, offset = self.recorder, self.offset_of(mine)
        source = recorder.sources.find()
        number = recorder.begin(COMPUTE, "add", mine.nbytes, mine.shape, offset=offset, source=source)
        super().add(mine, theirs, op)
        recorder.end(number)
        if mine.numel() <= MAX_VALUES:
            recorder.put_values(number, values_of(mine))
            self.note_values()


class RecordedWorks(Works):
    """Messages under way, of which waits are recorded."""

    def __init__(
        self, executor: RecordingExecutor, real: Works, sends: Sequence[int], receives: Sequence[int],
        arriving: Sequence[Addressed], source: int, together: bool,
    ) -> None:  # fmt: skip
        """`sends` and `receives` are numbers of events, waited for `together` or not; `arriving` the messages."""
        super().__init__(sends, receives)
        self.executor, self.real, self.arriving, self.source = executor, real, arriving, source
        self.together = together

    def received(self) -> None:
        arrived, self.receives = self.receives, ()
        beside: Sequence[int] = ()
        if self.together:
            beside, self.sends = self.sends, ()
        self.wait_for(self.real.received, (*arrived, *beside))
        if arrived:
            self.executor.put_values(arrived, self.arriving)
            self.executor.note_values()

    def sent(self) -> None:
        numbers, self.sends = self.sends, ()
        self.wait_for(self.real.sent, numbers)

    def wait_for(self, wait: Callable[[], None], numbers: Sequence[int]) -> None:
        """Wait, and record it if there is anything to wait for."""
        if not numbers:
            return wait()
        recorder = self.executor.recorder
        # A wait inside `exchange` has the line on which the messages were started.
        source = self.source if sys._getframe(2).f_code is EXCHANGE else recorder.sources.find(3)
        number = recorder.begin_wait(numbers, source)
        try:
            wait()
        except BaseException:
            recorder.end(number)
            raise
        recorder.end_all((number, *numbers))
        return None


class RecordedWork:
    """The work of a collective of ours, which records its own end: that may be long before a wait for it."""

    def __init__(self, recorder: Recorder, work: Any, number: int) -> None:
        self.recorder, self.work = recorder, work
        self.numbers = [number]
        """Numbers of the events that the first wait is for: the collective's, and that of the bucket it averages."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self) -> Any:
        numbers, self.numbers = self.numbers, []
        wait = self.recorder.begin_wait(numbers, self.recorder.sources.find()) if numbers else None
        try:
            return self.work.wait()
        finally:
            if wait is not None:
                self.recorder.end(wait)
            self.recorder.end_once(numbers)
