"""Records our own collectives: from call to end, their messages and waits, and the additions of chunks."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import collectives
from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add
from playground.algorithms.process_group import TAG
from playground.algorithms.transport import Addressed, Started, Transport
from playground.runtime.tap import ranks_of
from playground.runtime.tap.replacement import replaced
from playground.see.record import COLLECTIVE, COMPUTE, PHASE, RECEIVE, SEND, VALUES
from playground.see.record.distributed import GroupCounts, Ranks, bytes_of, values_of
from playground.see.record.layout import MAX_VALUES, NONE
from playground.see.record.recorder import Recorder

EXCHANGE = Messages.exchange.__code__


class RecordedTransport:
    """A transport of one collective that records its messages."""

    def __init__(self, real: Transport, recorder: Recorder, counts: GroupCounts, ranks: Ranks) -> None:
        self.real, self.recorder, self.ranks = real, recorder, ranks
        self.counts = counts[ranks, TAG]
        self.messages: Messages | None = None
        self.phase = ""
        self.phase_number = NONE

    def attach(self, messages: Messages) -> Messages:
        """Attach the messages that it carries, and return them."""
        self.messages, flat = messages, messages.flat
        self.first, self.length, self.itemsize = flat.data_ptr(), flat.nbytes, flat.element_size()
        self.note_values()
        return messages

    def offset_of(self, part: torch.Tensor) -> int:
        """The first element of this part of the collective's tensor; -1 if it is not part of it."""
        behind = part.data_ptr() - self.first
        return behind // self.itemsize if 0 <= behind < self.length else NONE

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def start(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Started:
        """Start messages, and record that while they are under way."""
        assert self.messages
        if self.messages.phase != self.phase:
            if self.phase:
                self.recorder.close(self.phase_number)
            self.phase = self.messages.phase
            if self.phase:
                self.phase_number = self.recorder.open(self.recorder.begin(PHASE, self.phase))
        now = self.recorder.clock()
        started = self.real.start(send, receive)
        source = self.recorder.sources.find(3)
        sends = [self.begin(SEND, "isend", tensor, peer, source, now) for tensor, peer in send]
        receives = [self.begin(RECEIVE, "irecv", tensor, peer, source, now) for tensor, peer in receive]
        self.put_values(sends, send)
        return RecordedStarted(self, started, sends, receives, receive, source)

    def begin(self, kind: str, name: str, tensor: torch.Tensor, peer: int, source: int, now: int) -> int:
        """Begin a message."""
        ranks, peer, offset = self.ranks, self.ranks[peer], self.offset_of(tensor)
        message, nbytes = next(self.counts[kind, peer]), tensor.nbytes
        return self.recorder.begin(kind, name, nbytes, tensor.shape, ranks, peer, message, TAG, offset, source, now)

    def put_values(self, numbers: Sequence[int], messages: Sequence[Addressed]) -> None:
        """Record the values of these messages, if they are small."""
        for number, (tensor, _) in zip(numbers, messages, strict=True):
            if tensor.numel() <= MAX_VALUES:
                self.recorder.put_values(number, values_of(tensor))

    def note_values(self) -> None:
        """Record the values that the rank now holds."""
        if self.messages and self.messages.flat.numel() <= MAX_VALUES:
            self.recorder.instant(VALUES, "holds", values_of(self.messages.flat), shape=self.messages.flat.shape)


@dataclass
class RecordedStarted:
    """Messages under way."""

    transport: RecordedTransport
    real: Started
    sends: Sequence[int]
    receives: Sequence[int]
    """Numbers of events."""
    arriving: Sequence[Addressed]
    """The messages received."""
    source: int

    def received(self) -> None:
        arrived, self.receives = self.receives, ()
        together: Sequence[int] = ()
        if self.transport.batched:  # all are waited for together
            together, self.sends = self.sends, ()
        self.wait_for(self.real.received, (*arrived, *together))
        if arrived:
            self.transport.put_values(arrived, self.arriving)
            self.transport.note_values()

    def sent(self) -> None:
        numbers, self.sends = self.sends, ()
        self.wait_for(self.real.sent, numbers)

    def wait_for(self, wait: Callable[[], None], numbers: Sequence[int]) -> None:
        """Wait, and record it if there is anything to wait for."""
        if not numbers:
            return wait()
        recorder = self.transport.recorder
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


class AlgorithmHooks:
    def __init__(self, recorder: Recorder, counts: GroupCounts) -> None:
        self.recorder, self.counts = recorder, counts
        self.here = threading.local()
        """`transport`: that of this thread's collective."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record our collectives in this block."""
        with (
            replaced(collectives, "run_collective", self.wrap_run_collective),
            replaced(collectives, "transport_of", self.wrap_transport_of),
            replaced(collectives, "adder", self.wrap_adder),
            replaced(collectives, "Messages", self.wrap_messages),
        ):
            yield

    def wrap_run_collective(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record the collective from the call until it is done."""
        recorder = self.recorder

        def run_collective(
            call: Any, group: Any, async_op: bool, whole: torch.Tensor | None = None, share: torch.Tensor | None = None
        ) -> Any:
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                return real(call, group, async_op, whole, share)
            tensor = call.args[1] if share is not None else call.args[0]
            name, ranks, source = name_of(call.func.__self__), ranks_of(group), recorder.sources.find()
            number = recorder.begin(COLLECTIVE, name, bytes_of(tensor), tensor.shape, ranks, source=source)
            work = real(functools.partial(self.run, number, call, async_op), group, async_op, whole, share)
            return None if work is None else RecordedWork(recorder, work, number)

        return run_collective

    def run(self, number: int, call: Any, async_op: bool, transport: RecordedTransport) -> None:
        """Run the collective, in this thread. Its transport records the messages: they are not recorded again where it
        calls torch.distributed."""
        recorder, thread = self.recorder, self.recorder.thread
        self.here.transport = transport
        recorder.open(number)
        if async_op:
            recorder.set_lane(number, thread.lane)
        thread.is_inside = True
        try:
            call(transport)
        finally:
            thread.is_inside = False
            recorder.close(number)
            transport.messages = self.here.transport = None  # each refers to the other
        recorder.put_values(number, values_of(call.args[0]))

    def wrap_transport_of(self, real: Callable[[Any], Transport]) -> Callable[[Any], RecordedTransport]:
        return lambda group: RecordedTransport(real(group), self.recorder, self.counts, ranks_of(group))

    def wrap_messages(self, real: type[Messages]) -> Callable[..., Messages]:
        return lambda flat, transport, op=None: transport.attach(real(flat, transport, op))

    def wrap_adder(self, real: Callable[[Any], Add]) -> Callable[[Any], Add]:
        """Record each addition."""
        recorder = self.recorder

        def adder(op: Any) -> Add:
            add, transport = real(op), self.here.transport

            def recorded_add(mine: torch.Tensor, theirs: torch.Tensor) -> None:
                offset, source = transport.offset_of(mine), recorder.sources.find()
                number = recorder.begin(COMPUTE, "add", mine.nbytes, mine.shape, offset=offset, source=source)
                add(mine, theirs)
                recorder.end(number)
                if mine.numel() <= MAX_VALUES:
                    recorder.put_values(number, values_of(mine))
                    transport.note_values()

            return recorded_add

        return adder


def name_of(collective: Any) -> str:
    """The name of the collective, with its algorithm."""
    algorithm = collective.algorithm.__name__
    return f"all_reduce ({algorithm})" if isinstance(collective, collectives.AllReduce) else algorithm


class RecordedWork:
    """The work of a collective of ours, which records its own end: that may be long before a wait for it."""

    def __init__(self, recorder: Recorder, work: Any, number: int) -> None:
        self.recorder, self.work = recorder, work
        self.numbers = [number]
        """Of the events that the first wait is for."""

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
