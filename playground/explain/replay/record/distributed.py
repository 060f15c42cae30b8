"""Records torch.distributed: messages between two ranks, and collectives."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from playground.algorithms.traffic import bytes_of
from playground.base.event_log import NONE
from playground.explain.hang import STRANGERS
from playground.explain.replay.record.layout import MAX_VALUES
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.record.recording import COLLECTIVE, RECEIVE, SEND, VALUES
from playground.tap import MESSAGES, Call, Observer

FARTHEST = STRANGERS // 2 - 1
"""The number of a rank that does not exist: the largest that a record holds."""
Ranks = tuple[int, ...]
Counts = defaultdict[tuple[str, int], Iterator[int]]
"""Numbers of the next messages, by kind and by the other rank. Both ends count alike."""


def values_of(tensor: torch.Tensor) -> list[float] | None:
    """The values of a tensor, flat; None if it is too large, or on a GPU, where reading it would
    have to wait."""
    if tensor.numel() > MAX_VALUES or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    values: list[float] = tensor.tolist() if tensor.dim() == 1 else tensor.flatten().tolist()
    return values


def values_of_all(tensors: Sequence[torch.Tensor]) -> list[float] | None:
    """The values of several tensors, one after the other."""
    if len(tensors) == 1:
        return values_of(tensors[0])
    if not tensors or sum(tensor.numel() for tensor in tensors) > MAX_VALUES:
        return None
    parts = [values_of(tensor) for tensor in tensors]
    return None if None in parts else [value for part in parts for value in part or ()]


def peer_of(call: Call) -> int | None:
    """The peer of a message, as an event has it."""
    if call.peer is not None or call.number_of_peer is None:
        return call.peer
    return STRANGERS + max(-FARTHEST, min(call.number_of_peer, FARTHEST))


class CallRecorder(Observer):
    """Records the calls that the tap tells of."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.thread = recorder.thread
        self.counts: defaultdict[tuple[Ranks, int], Counts] = defaultdict(
            lambda: defaultdict(itertools.count)
        )
        """The numbers of the next messages, by group and tag."""
        self.events: dict[int, int] = {}
        """Number of the event of a call, until that is over, by the call's number."""
        self.waits: dict[int, int] = {}
        """Number of the event of a wait for a call, by its number."""
        self.in_turn = threading.Lock()
        """Several threads send: messages are numbered in the order in which they leave."""

    def begun(self, call: Call) -> None:
        if self.thread.is_inside:
            return
        if call.method not in MESSAGES:
            number = self.begin_collective(call)
        else:
            if not call.blocks:
                self.in_turn.acquire()
            kind, source = SEND if call.method == "send" else RECEIVE, self.recorder.sources.find()
            [tensor] = call.inputs or call.outputs
            number = self.begin_message(
                kind, call.name, tensor, call.ranks, peer_of(call), call.tag, source
            )
        self.events[call.number] = number
        self.thread.is_inside = True

    def begin_message(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        ranks: Ranks,
        peer: int | None,
        tag: int,
        source: int,
        offset: int = NONE,
    ) -> int:
        """Record the start of a message to or from `peer`; None: from anyone."""
        recorder, other, message = self.recorder, NONE, NONE
        if peer is not None:
            other, message = peer, next(self.counts[ranks, tag][kind, peer])
        number = recorder.begin(
            kind, name, nbytes=bytes_of(tensor), shape=tensor.shape, group=ranks,
            peer=other, message=message, tag=tag, offset=offset, source=source,
        )  # fmt: skip
        if kind == SEND:
            recorder.put_values(number, values_of(tensor))
        return number

    def begin_collective(self, call: Call) -> int:
        recorder, tensors = self.recorder, call.inputs or call.outputs
        number = recorder.begin(
            COLLECTIVE,
            call.name,
            nbytes=sum(map(bytes_of, tensors)),
            shape=tensors[0].shape if len(tensors) == 1 else (),
            group=call.ranks,
            peer=NONE if call.peer is None else call.peer,
            source=recorder.sources.find(),
            parent=recorder.around(),
        )
        if (before := values_of_all(call.inputs)) is not None:
            recorder.instant(VALUES, "before", before, parent=number)
        return number

    def returned(self, call: Call) -> None:
        if call.number in self.events:
            self.thread.is_inside = False
            if call.method in MESSAGES and not call.blocks:
                self.in_turn.release()

    def waiting(self, calls: Sequence[Call]) -> None:
        numbers = [self.events[call.number] for call in calls if call.number in self.events]
        if numbers:
            source = self.recorder.sources.find()
            self.waits[calls[0].number] = self.recorder.begin_wait(numbers, source)

    def waited(self, calls: Sequence[Call]) -> None:
        """A wait that failed ends here; others are over when what they are for is done."""
        first = calls[0].number
        if first in self.waits and first not in self.events:
            self.recorder.end(self.waits.pop(first))

    def done(self, calls: Sequence[Call]) -> None:
        ended = [
            (call, self.events.pop(call.number)) for call in calls if call.number in self.events
        ]
        numbers = [number for _, number in ended]
        if (wait := self.waits.pop(calls[0].number, None)) is not None:
            numbers.append(wait)
        self.recorder.end_all(numbers)
        for call, number in ended:
            if call.method == "recv_anysource":
                sender = call.find_sender()
                message = next(self.counts[call.ranks, call.tag][RECEIVE, sender])
                self.recorder.note_sender(number, sender, message)
            if call.method != "send":
                self.recorder.put_values(number, values_of_all(call.outputs or call.inputs))

    def failed(self, calls: Sequence[Call], error: BaseException) -> None:
        for call in calls:
            if call.work is None:
                self.returned(call)
            number = self.events.pop(call.number, None)
            if number is not None and (call.blocks or call.work is None):
                self.recorder.end(number)
