"""Records our own collectives: from call to end, the phases in them, their messages, and the
additions of chunks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from playground.algorithms import messages
from playground.algorithms.all_reduce import current_phase
from playground.algorithms.executor import (
    TAG,
    Addressed,
    CollectiveCall,
    Executor,
    Group,
    Subset,
    Works,
    number_in_whole,
)
from playground.algorithms.traffic import bytes_of
from playground.base.event_log import NONE
from playground.explain.replay.record.distributed import CallRecorder, values_of
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.record.recording import (
    COLLECTIVE,
    COMPUTE,
    PHASE,
    RECEIVE,
    SEND,
    VALUES,
)
from playground.tap import ranks_of

EXCHANGE = messages.exchange.__code__


class RecordingExecutor(Executor):
    """Records what it does. Within a collective, only what it starts itself is recorded of
    torch.distributed."""

    def __init__(self, recorder: Recorder, calls: CallRecorder) -> None:
        self.recorder = recorder
        self.calls = calls

    def collective(self, made: CollectiveCall) -> Any:
        """Record the collective from the call until it is done."""
        recorder = self.recorder
        number = recorder.begin(
            COLLECTIVE,
            made.name,
            nbytes=bytes_of(made.input),
            shape=made.input.shape,
            group=ranks_of(made.group),
            source=recorder.sources.find(),
            parent=recorder.around(),
        )
        whole = functools.partial(self.run_whole, number, made)
        work = super().collective(made._replace(call=whole))
        return None if work is None else RecordedWork(recorder, work, number)

    def run_whole(self, number: int, made: CollectiveCall) -> None:
        """Run the collective, in this thread."""
        recorder, thread = self.recorder, self.recorder.thread
        recorder.open(number)
        if made.async_op:
            recorder.set_lane(number, thread.lane)
        thread.is_inside = True
        try:
            made.call()
        finally:
            thread.is_inside = False
            recorder.close(number)
            thread.flat = None
            thread.phase = ""
        recorder.put_values(number, values_of(made.output))

    def run(self, algorithm: Callable[..., None], flat: torch.Tensor, *arguments: Any) -> None:
        self.recorder.thread.flat = flat
        self.note_values()
        super().run(algorithm, flat, *arguments)

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        """Start messages of a collective, and begin the phase that they are the first of."""
        recorder, thread = self.recorder, self.recorder.thread
        if not thread.is_inside:
            return super().start(group, send, receive)
        if (phase := current_phase(group)) != thread.phase:
            if thread.phase:
                recorder.close(thread.phase_number)
            thread.phase = phase
            if phase:
                thread.phase_number = recorder.open(recorder.begin(PHASE, phase))
        source = recorder.sources.find(3)
        ranks = ranks_of(group.whole if isinstance(group, Subset) else group)
        with self.calls.in_turn:
            sends, receives = (
                [
                    self.calls.begin_message(
                        kind, name, tensor, ranks, ranks[rank], TAG, source, self.offset_of(tensor)
                    )
                    for tensor, rank in number_in_whole(group, messages)
                ]
                for kind, name, messages in ((SEND, "isend", send), (RECEIVE, "irecv", receive))
            )
            works = super().start(group, send, receive)
        arriving = [tensor for tensor, _ in receive]
        return RecordedWorks(self, works, sends, receives, arriving, source)

    def offset_of(self, part: torch.Tensor) -> int:
        """The first element of this part of the tensor of our collective; -1 if it is not part of
        it."""
        flat = self.recorder.thread.flat
        if flat is None:
            return NONE
        behind = part.data_ptr() - flat.data_ptr()
        return behind // flat.element_size() if 0 <= behind < flat.nbytes else NONE

    def note_values(self) -> None:
        """Record the values that the rank now holds in our collective."""
        flat = self.recorder.thread.flat
        if flat is not None and (values := values_of(flat)) is not None:
            self.recorder.instant(VALUES, "holds", values, shape=flat.shape)

    def add(self, mine: torch.Tensor, theirs: torch.Tensor, op: Any) -> None:
        """Record the addition."""
        recorder, offset = self.recorder, self.offset_of(mine)
        source = recorder.sources.find()
        number = recorder.begin(
            COMPUTE, "add", nbytes=mine.nbytes, shape=mine.shape, offset=offset, source=source
        )
        super().add(mine, theirs, op)
        recorder.end(number)
        if (values := values_of(mine)) is not None:
            recorder.put_values(number, values)
            self.note_values()


class RecordedWorks(Works):
    """Messages under way: the program waits for all that are to be received, and for all that are
    sent."""

    def __init__(
        self, executor: RecordingExecutor, works: Works, sends: list[int], receives: list[int],
        arriving: list[torch.Tensor], source: int,
    ) -> None:  # fmt: skip
        """`sends` and `receives` are the numbers of the messages' events, `arriving` the tensors to
        be received."""
        super().__init__(works.sends, works.receives)
        self.executor = executor
        self.arriving = [*zip(receives, arriving, strict=True)]
        self.source = source
        # or in a batch
        self.to_receive, self.to_send = (receives, sends) if works.sends else (receives + sends, [])

    def received(self) -> None:
        self.wait(self.to_receive, super().received)
        for number, tensor in self.arriving:
            self.executor.recorder.put_values(number, values_of(tensor))
        if self.arriving:
            self.executor.note_values()

    def sent(self) -> None:
        self.wait(self.to_send, super().sent)

    def wait(self, numbers: list[int], wait: Callable[[], None]) -> None:
        """Call `wait`, which waits for these messages."""
        if numbers:
            # inside `exchange` the line that waits is the one that started the messages
            recorder, is_same = self.executor.recorder, sys._getframe(2).f_code is EXCHANGE
            number = recorder.begin_wait(
                numbers, self.source if is_same else recorder.sources.find(3)
            )
            wait()
            recorder.end_all([number, *numbers])


class RecordedWork:
    """The work of a collective of ours, which records its own end: that may be long before a wait
    for it."""

    def __init__(self, recorder: Recorder, work: Any, number: int) -> None:
        self.recorder = recorder
        self.work = work
        self.number: int | None = number
        """The number of the collective's event, until the first wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def wait(self) -> Any:
        number = self.number
        self.number = None
        if number is None:
            return self.work.wait()
        wait = self.recorder.begin_wait([number], self.recorder.sources.find())
        try:
            return self.work.wait()
        finally:
            self.recorder.end(wait)
