"""In a rank: records what is alive on its simulated GPUs when they hold most, by line."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from playground.base.event_log import NONE
from playground.base.upstream import local_of, when_cuda_starts
from playground.explain.lines import Lines
from playground.explain.memory import (
    ACTIVATIONS,
    GRADIENTS,
    MOST_KINDS,
    OF_BACKWARD,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    file_name,
)
from playground.world.simulated_gpu.environment import kernels

FIND_CAUSE = ctypes.CFUNCTYPE(ctypes.c_int64)
WIDTH = 4
"""Numbers of a row: line, kind, tensors, bytes."""
MOST_ROWS = 10_000
CALL = nn.Module.__call__.__code__
"""The code in which every forward of a module runs."""


class AllocationRecorder:
    """Notes the cause of each allocation from when CUDA starts in this process until `stop`."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.library: Any = None
        self.steps = 0
        """How many optimizers are in their step."""
        self.marked = 0
        """The number of peaks when tensors were marked last."""
        self.find_cause = FIND_CAUSE(self.find_line_and_kind)
        self.handles = [
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        when_cuda_starts(self.start)

    def start(self) -> None:
        self.library = ctypes.CDLL(str(kernels()))
        self.library.memory_peaks.restype = ctypes.c_uint64
        self.library.memory_read.restype = ctypes.c_int64
        self.library.memory_record(self.find_cause)

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.library:
            self.library.memory_stop()

    def find_line_and_kind(self) -> int:
        """The cause of an allocation in this thread. Is called by the allocator."""
        number = self.lines.find_cause()
        kind = OPTIMIZER if self.steps else find_kind(sys._getframe(0).f_back)
        return (number - NONE) * MOST_KINDS + kind

    def before_step(self, optimizer: Optimizer, *args: Any) -> None:
        self.steps += 1

    def after_step(self, optimizer: Optimizer, *args: Any) -> None:
        """What there is at the end of a step is known by its owner, and the rest was for the
        step."""
        self.steps -= 1
        if self.library and self.marked != (peaks := self.library.memory_peaks()):
            self.mark_optimizer(optimizer)
            self.library.memory_end_step()
            self.marked = peaks

    def mark_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                self.mark_parameter(param)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                self.mark(value, OPTIMIZER)

    def mark_parameter(self, param: torch.Tensor) -> None:
        self.mark(param, PARAMETERS)
        self.mark(param.grad, GRADIENTS)

    def mark(self, value: Any, kind: int) -> None:
        held = local_of(value)
        held = value if held is None else held
        if not (isinstance(held, torch.Tensor) and held.is_cuda):
            return
        with contextlib.suppress(RuntimeError):  # a tensor without memory of its own
            address = ctypes.c_size_t(held.untyped_storage().data_ptr())
            self.library.memory_mark(held.device.index, address, ctypes.c_int64(kind))

    def read(self) -> list[dict[str, object]]:
        """What was alive at the peak of each GPU that this process has used."""
        if not self.library:
            return []
        for thing in gc.get_objects():  # also without an optimizer, or before its first step
            if issubclass(type(thing), nn.Module):
                for param in vars(thing).get("_parameters", {}).values():
                    if param is not None:
                        self.mark_parameter(param)
            elif issubclass(type(thing), Optimizer):
                self.mark_optimizer(thing)
        known = [f"{os.path.basename(name)}:{line}" for name, line, _, _ in self.lines.lines]
        names = ["no line", *known]
        found = []
        for device in range(torch.cuda.device_count()):
            peak, rows = (ctypes.c_int64 * 3)(), (ctypes.c_int64 * (WIDTH * MOST_ROWS))()
            count = min(MOST_ROWS, self.library.memory_read(device, peak, rows, MOST_ROWS))
            if not count:
                continue
            nbytes, where, lacking = peak
            table = [rows[WIDTH * row : WIDTH * (row + 1)] for row in range(count)]
            found.append(
                {
                    "device": device,
                    "capacity": torch.cuda.get_device_properties(device).total_memory,
                    "nbytes": nbytes,
                    "reserved": torch.cuda.max_memory_reserved(device),
                    "where": names[where],
                    "lacking": lacking,
                    "rows": [(names[line], *more) for line, *more in table],
                }
            )
        return found


def find_kind(frame: FrameType | None) -> int:
    """What is probably allocated in this frame. Autograd's threads for GPUs have none."""
    if frame is None:
        return OF_BACKWARD
    while frame is not None:
        if frame.f_code is CALL:
            return ACTIVATIONS
        frame = frame.f_back
    return OTHER


@contextlib.contextmanager
def recorded(folder: Path, rank: int) -> Iterator[None]:
    """In this block, record the memory of this rank. At its end, write it into the folder."""
    recorder = AllocationRecorder()
    try:
        yield
    finally:
        recorder.stop()
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file_name(rank)).write_text(json.dumps(recorder.read()), encoding="utf-8")
