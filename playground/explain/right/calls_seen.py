"""In a rank: sees tensors that a call cannot take as they are, and what becomes of them until it is
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from playground.base.event_log import NONE
from playground.base.upstream import count_collectives, is_carried_by_gloo, version_of
from playground.explain.right.facts import CUT, GAPS, OUTSIDE, UNWAITED, WRITTEN
from playground.explain.right.fingerprint import find_fingerprint, has_gaps
from playground.explain.right.log import CALLS, LAYOUT, MESSAGES, MISUSE
from playground.explain.right.source import find_loss, puts_back
from playground.explain.right.watcher import Notes, SeesCalls, Watcher, guarded, is_whole
from playground.tap import MESSAGES as SENDING, METHODS, Call

IN_PLACE = {"allreduce", "broadcast", "send", "recv"}
"""Methods that work on one tensor, where it is: gloo writes it without its version being
counted."""
GATHERS = {"all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"}
"""Operations that bring activations of other ranks, through which no gradient flows."""
REDUCTIONS = {"allreduce", "reduce"}
"""Methods that leave their result in the tensor that they are given."""
IN_MEMORY = {"allreduce", "broadcast", "reduce"}
"""Methods by which gloo goes through the memory of a tensor, whatever its strides."""
MOST_SENT, MOST_IN_FLIGHT, MOST_MISUSES, MOST_LAYOUTS = 64, 1024, 32, 64
"""How many messages are looked at, tensors are remembered, and misuses and layouts are told."""


@dataclass(eq=False, slots=True)
class InFlight:
    """A tensor that an asynchronous call reads or writes."""

    tensor: Any
    version: int
    form: tuple[object, ...]
    """Its shape and strides, and where it lies."""
    print: int | None
    """Its fingerprint, where the call only reads."""
    line: int
    waits: int
    """How many calls this rank had waited for when it was made."""


class CallWatcher(SeesCalls):
    """Sees the tensors of single calls: of later ones, those in steps that are looked at."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        self.in_flight: dict[int, InFlight] = {}
        """By the number of the call."""
        self.waits = 0
        """How many calls this rank has waited for: others may have told it by them that they are
        done."""
        self.sent = 0
        """How many messages were looked at."""
        self.has_calls = self.has_messages = False
        self.unwaited: dict[int, int] = {}
        """The lines of asynchronous calls that nobody has waited for, by the number of the call."""
        self.known_lines: set[int] = set()
        """The lines whose source was looked at."""
        self.misuses: set[tuple[str, str, int]] = set()
        self.layouts: set[tuple[object, ...]] = set()
        """Strides that were told, with the line of the call."""

    @guarded
    def begun(self, call: Call) -> None:
        tensors = [*call.inputs, *call.outputs]
        if not self.has_calls:
            self.has_calls = True
            self.notes.log.tell(CALLS)
        if call.method in SENDING and not self.has_messages:
            self.has_messages = True
            self.notes.log.tell(MESSAGES)
        if (
            call.method in IN_MEMORY
            and any(map(has_gaps, tensors))
            and len(call.ranks) > 1
            and is_carried_by_gloo(call.group, tensors[0].device)
        ):
            self.tell_misuse(GAPS, call.name, self.notes.lines.find_cause())
        if call.method in IN_MEMORY and tensors[0].dim() > 1 and len(call.ranks) > 1:
            self.look_at_layout(call, tensors[0])
        # only the root of a reduce needs the result
        if call.method in REDUCTIONS and call.peer in (None, dist.get_rank()):
            self.look_at_copy(call)
        takes_gradients = METHODS[call.method].name in GATHERS and torch.is_grad_enabled()
        if takes_gradients and any(each.grad_fn and each.numel() > 1 for each in call.inputs):
            self.look_at_gather(call)

    @guarded
    def returned(self, call: Call) -> None:
        """An asynchronous call is under way: its tensor is not to be written until it has been
        waited for."""
        if not call.blocks and not call.is_torchs and len(self.unwaited) < MOST_IN_FLIGHT:
            self.unwaited[call.number] = self.notes.lines.find_cause()
        if call.blocks or call.method not in IN_PLACE or len(call.ranks) == 1:
            self.waits += 1
            return
        tensor = (call.inputs or call.outputs)[0]
        if not is_whole(tensor) or not is_carried_by_gloo(call.group, tensor.device):
            return
        reads = call.method == "send"
        if reads and self.sent >= MOST_SENT:
            return
        self.sent += reads
        if len(self.in_flight) < MOST_IN_FLIGHT:
            self.in_flight[call.number] = InFlight(
                tensor, version_of(tensor), form_of(tensor),
                find_fingerprint(tensor) if reads else None, self.notes.lines.find_cause(),
                self.waits,
            )  # fmt: skip

    @guarded
    def waiting(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.unwaited.pop(call.number, None)
            flight = self.in_flight.pop(call.number, None)
            if flight is None or call.is_asked or flight.waits != self.waits:
                continue
            tensor = flight.tensor
            if version_of(tensor) == flight.version or flight.form != form_of(tensor):
                continue
            if flight.print is None or flight.print != find_fingerprint(tensor):
                self.tell_misuse(WRITTEN, call.name, flight.line)
        self.waits += 1

    @guarded
    def dropped(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.in_flight.pop(call.number, None)
            line = self.unwaited.pop(call.number, NONE)
            if not (call.is_asked or line == NONE):
                self.tell_misuse(UNWAITED, call.name, line)

    @guarded
    def failed(self, calls: Sequence[Call], error: BaseException) -> None:
        for call in calls:
            self.in_flight.pop(call.number, None)
            self.unwaited.pop(call.number, None)

    def find_new_frame(self, number: int) -> FrameType | None:
        """The program's frame, if its line is looked at for the first time."""
        if number in self.known_lines or len(self.known_lines) >= MOST_IN_FLIGHT:
            return None
        self.known_lines.add(number)
        return self.notes.lines.find_frame()

    def look_at_copy(self, call: Call) -> None:
        number = self.notes.lines.find_cause()
        frame = self.find_new_frame(number)
        if frame is not None and (kind := find_loss(frame, call.inputs[0])):
            self.tell_misuse(kind, call.name, number)

    def look_at_layout(self, call: Call, tensor: Any) -> None:
        """Tell how the tensor of a call lies in memory, once for each line and layout."""
        number, form = self.notes.lines.find_cause(), (tensor.shape, tensor.stride())
        if (number, form) in self.layouts or len(self.layouts) >= MOST_LAYOUTS:
            return
        self.layouts.add((number, form))
        clock = count_collectives(call.group)
        if (
            clock is None
            or not tensor.numel()
            or has_gaps(tensor)
            or not is_carried_by_gloo(call.group, tensor.device)
        ):
            return
        strides = [
            0 if size == 1 else stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        self.notes.log.tell(
            LAYOUT, call.name, call.group.group_name, list(call.ranks), clock, list(tensor.shape),
            strides, self.notes.line_of(number), self.notes.step,
        )  # fmt: skip

    def look_at_gather(self, call: Call) -> None:
        number = self.notes.lines.find_cause()
        frame = self.find_new_frame(number)
        if frame is not None and not puts_back(frame):
            self.tell_misuse(CUT, call.name, number)

    def tell_misuse(self, kind: str, operation: str, number: int) -> None:
        if (kind, operation, number) in self.misuses or len(self.misuses) >= MOST_MISUSES:
            return
        self.misuses.add((kind, operation, number))
        self.notes.log.tell(MISUSE, kind, operation, self.notes.line_of(number), self.notes.step)


class OutsideWatcher(Watcher):
    """Sees the calls for groups that the rank is not in."""

    looks_at_training = True

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        self.told: set[tuple[str, int]] = set()

    @guarded
    def called_from_outside(self, operation: str) -> None:
        line = self.notes.write_line()
        if (operation, line) not in self.told and len(self.told) < MOST_MISUSES:
            self.told.add((operation, line))
            self.notes.log.tell(MISUSE, OUTSIDE, operation, line, self.notes.step)


def form_of(tensor: Any) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.data_ptr()
