"""Our own collectives: from call to end, and what they add on their way."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import collectives
from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add
from playground.algorithms.transport import Transport
from playground.see.record.hooks.groups import Groups
from playground.see.record.hooks.replace import replaced
from playground.see.record.hooks.tensors import bytes_of, values_of
from playground.see.record.hooks.transport import RecordedTransport
from playground.see.record.hooks.works import RecordedWork
from playground.see.record.layout import MAX_VALUES
from playground.see.record.recorder import Recorder
from playground.see.record.recording import COLLECTIVE, COMPUTE


@contextlib.contextmanager
def recorded(recorder: Recorder, groups: Groups) -> Iterator[None]:
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
                COLLECTIVE, name_of(call.func.__self__), bytes_of(tensor), tensor.shape, self.groups.ranks_of(group),
                source=recorder.sources.find(),
            )  # fmt: skip
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
                    COMPUTE, "add", mine.nbytes, mine.shape, offset=transport.offset_of(mine),
                    source=recorder.sources.find(),
                )  # fmt: skip
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
