"""One process and its devices: copies from one to another, and whose work its threads do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from playground.see.record.hooks.replace import replaced
from playground.see.record.hooks.tensors import bytes_of
from playground.see.record.layout import LANE_CODES
from playground.see.record.moves import name_of_move
from playground.see.record.recorder import Recorder
from playground.see.record.recording import MAIN, MOVE
from playground.training import device_work

MACHINERY = 5
"""Frames between `find` and who copies: the hook, who reports the copy, and twice what enters a context manager."""


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """In this block, they are recorded."""
    hooks = DeviceHooks(recorder)
    with (
        replaced(device_work, "moving", hooks.wrap_moving),
        replaced(device_work, "working_for", hooks.wrap_working_for),
    ):
        yield


class DeviceHooks:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def wrap_moving(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record each tensor's copy; they begin and end together."""
        recorder = self.recorder

        @contextlib.contextmanager
        def moving(
            part: str, tensors: Sequence[tuple[torch.device, torch.Tensor]], target: torch.device
        ) -> Iterator[None]:
            source, now, around = recorder.sources.find(MACHINERY), recorder.clock(), recorder.around()
            numbers = [
                recorder.begin(
                    MOVE, name_of_move(part, str(device), str(target)), bytes_of(tensor), tensor.shape, source=source,
                    start=now, parent=around,
                )
                for device, tensor in tensors
            ]  # fmt: skip
            try:
                yield
            finally:
                recorder.end_all(numbers)

        return moving

    def wrap_working_for(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record it as a phase with the name of the device. The main thread works for all of them."""
        recorder = self.recorder

        def working_for(device: torch.device) -> contextlib.AbstractContextManager[None]:
            is_main = recorder.thread.lane == LANE_CODES[MAIN]
            return real(device) if is_main else recorder.working_for(device)

        return working_for
