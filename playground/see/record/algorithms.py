"""Our own collectives: from call to end, their messages and what these wait for, and what they add on their way."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import collectives
from playground.algorithms.hosts import Hosts
from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add
from playground.algorithms.process_group import TAG
from playground.algorithms.transport import Addressed, Started, Transport
from playground.see.record import COLLECTIVE, COMPUTE, PHASE, RECEIVE, SEND, VALUES
from playground.see.record.distributed import Groups, Ranks, RecordedWork, bytes_of, replaced, values_of
from playground.see.record.layout import MAX_VALUES, NONE
from playground.see.record.recorder import Recorder

EXCHANGE = Messages.exchange.__code__


class RecordedTransport:
    """A transport whose messages are recorded, for one collective."""

    def __init__(self, real: Transport, recorder: Recorder, groups: Groups, ranks: Ranks) -> None:
        self.real, self.recorder, self.ranks = real, recorder, ranks
        self.counts = groups.counts[ranks, TAG]
        self.rank, self.size = real.rank, real.size
        self.batched, self.allows_threads = real.batched, real.allows_threads
        self.messages: Messages | None = None
        self.phase = ""
        self.phase_number = NONE

    def attach(self, messages: Messages) -> None:
        """These are the messages that it is to carry."""
        self.messages, flat = messages, messages.flat
        self.first, self.length, self.itemsize = flat.data_ptr(), flat.nbytes, flat.element_size()
        self.note_values()

    def offset_of(self, part: torch.Tensor) -> int:
        """Where in the collective's tensor this part of it begins, in elements; -1 if it is no part of it."""
        behind = part.data_ptr() - self.first
        return behind // self.itemsize if 0 <= behind < self.length else NONE

    def hosts(self, device: torch.device) -> Hosts:
        return self.real.hosts(device)

    def start(self, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Started:
        """Start them, and write that down while they are under way."""
        assert self.messages
        if self.messages.phase != self.phase:
            self.enter_phase(self.messages.phase)
        now = self.recorder.clock()
        started = self.real.start(send, receive)
        source = self.recorder.sources.find(3)
        sends = [self.begin(SEND, "isend", tensor, peer, source, now) for tensor, peer in send]
        receives = [self.begin(RECEIVE, "irecv", tensor, peer, source, now) for tensor, peer in receive]
        self.put_values(sends, send)
        return RecordedStarted(self, started, sends, receives, receive, source)

    def begin(self, kind: str, name: str, tensor: torch.Tensor, peer: int, source: int, now: int) -> int:
        """A message has begun."""
        peer = self.ranks[peer]
        return self.recorder.begin(
            kind, name, tensor.nbytes, tensor.shape, self.ranks, peer, next(self.counts[kind, peer]), TAG,
            self.offset_of(tensor), source, now,
        )  # fmt: skip

    def put_values(self, numbers: Sequence[int], messages: Sequence[Addressed]) -> None:
        """What these messages hold, if they are small."""
        for number, (tensor, _) in zip(numbers, messages, strict=True):
            if tensor.numel() <= MAX_VALUES:
                self.recorder.put_values(number, values_of(tensor))

    def enter_phase(self, name: str) -> None:
        """End the phase that the algorithm was in and begin this one; "" is none."""
        if self.phase:
            self.recorder.close(self.phase_number)
        self.phase = name
        if name:
            self.phase_number = self.recorder.open(self.recorder.begin(PHASE, name))

    def note_values(self) -> None:
        """What the rank now holds."""
        if self.messages and self.messages.flat.numel() <= MAX_VALUES:
            self.recorder.instant(VALUES, "holds", values_of(self.messages.flat), shape=self.messages.flat.shape)


class RecordedStarted:
    """Messages under way."""

    def __init__(
        self,
        transport: RecordedTransport,
        real: Started,
        sends: Sequence[int],
        receives: Sequence[int],
        arriving: Sequence[Addressed],
        source: int,
    ) -> None:
        """`sends` and `receives` are the numbers of events; `arriving` is what is received."""
        self.transport, self.real, self.source = transport, real, source
        self.sends, self.receives, self.arriving = sends, receives, arriving

    def received(self) -> None:
        arrived, self.receives = self.receives, ()
        if self.transport.batched:  # all are waited for together
            numbers, self.sends = (*arrived, *self.sends), ()
        else:
            numbers = (*arrived,)
        self.wait_for(self.real.received, numbers)
        if arrived:
            self.transport.put_values(arrived, self.arriving)
            self.transport.note_values()

    def sent(self) -> None:
        numbers, self.sends = self.sends, ()
        self.wait_for(self.real.sent, numbers)

    def wait_for(self, wait: Callable[[], None], numbers: Sequence[int]) -> None:
        """Wait, and record it if there is anything to be waited for."""
        if not numbers:
            return wait()
        recorder = self.transport.recorder
        # Where `exchange` waits, the line is the one on which the messages were started.
        source = self.source if sys._getframe(2).f_code is EXCHANGE else recorder.sources.find(3)
        number = recorder.begin_wait(numbers, source)
        try:
            wait()
        except BaseException:
            recorder.end(number)
            raise
        recorder.end_all((number, *numbers))
        return None


@contextlib.contextmanager
def recorded_algorithms(recorder: Recorder, groups: Groups) -> Iterator[None]:
    """In this block, our collectives are recorded."""
    hooks = AlgorithmHooks(recorder, groups)
    with (
        replaced(collectives, "run_collective", hooks.wrap_run_collective),
        replaced(collectives, "transport_of", hooks.wrap_transport_of),
        replaced(collectives, "adder", hooks.wrap_adder),
        replaced(collectives, "Messages", hooks.wrap_messages),
    ):
        yield


class AlgorithmHooks:
    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        self.recorder, self.groups = recorder, groups
        self.here = threading.local()
        """`transport`: that of the collective which this thread is in."""

    def wrap_run_collective(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record the collective from the call until it is done."""
        recorder = self.recorder

        def run_collective(
            call: Any, group: Any, async_op: bool, whole: torch.Tensor | None = None, share: torch.Tensor | None = None
        ) -> Any:
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                return real(call, group, async_op, whole, share)
            tensor = call.args[1] if share is not None else call.args[0]
            number = recorder.begin(
                COLLECTIVE,
                name_of(call.func.__self__),
                bytes_of(tensor),
                tensor.shape,
                self.groups.ranks_of(group),
                source=recorder.sources.find(),
            )
            work = real(functools.partial(self.run, number, call, async_op), group, async_op, whole, share)
            return None if work is None else RecordedCollectiveWork(recorder, work, [(number, ())])

        return run_collective

    def run(self, number: int, call: Any, async_op: bool, transport: RecordedTransport) -> None:
        """Carry out the collective, in whichever thread this is. Its transport records the messages: where that calls
        torch.distributed, they are not recorded again."""
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

    def wrap_transport_of(self, real: Callable[[Any], Transport]) -> Callable[[Any], Transport]:
        return lambda group: RecordedTransport(real(group), self.recorder, self.groups, self.groups.ranks_of(group))

    def wrap_messages(self, real: type[Messages]) -> Callable[..., Messages]:
        def messages(flat: torch.Tensor, transport: RecordedTransport) -> Messages:
            made = real(flat, transport)
            transport.attach(made)
            return made

        return messages

    def wrap_adder(self, real: Callable[[Any], Add]) -> Callable[[Any], Add]:
        """Record each addition."""
        recorder = self.recorder

        def adder(op: Any) -> Add:
            add, transport = real(op), self.here.transport

            def recorded_add(mine: torch.Tensor, theirs: torch.Tensor) -> None:
                number = recorder.begin(
                    COMPUTE,
                    "add",
                    mine.nbytes,
                    mine.shape,
                    offset=transport.offset_of(mine),
                    source=recorder.sources.find(),
                )
                add(mine, theirs)
                recorder.end(number)
                if mine.numel() <= MAX_VALUES:
                    recorder.put_values(number, values_of(mine))
                    transport.note_values()

            return recorded_add

        return adder


def name_of(collective: Any) -> str:
    """What is called, and by which algorithm."""
    algorithm = collective.algorithm.__name__
    return f"all_reduce ({algorithm})" if isinstance(collective, collectives.AllReduce) else algorithm


class RecordedCollectiveWork(RecordedWork):
    """Of a collective that itself says when it is over: that may be long before anybody waits for it."""

    def finish(self) -> None:
        self.pending = ()
