"""In a rank: functional collectives write to its flight recorder. They call operators of C++, and
no method of the group's.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from playground.base.event_log import NONE
from playground.base.upstream import FUNCTIONAL, memory_of, resolve_group
from playground.explain.hang.box_format import GPU, Description
from playground.explain.hang.recording import FlightRecorder
from playground.explain.hang.states import COLLECTIVE
from playground.tap.replacement import calling
from playground.tap.tap import record_also

FUNCTIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
}
"""Functional collectives, with the names of the functions of torch.distributed that do the same:
the ones that others call, such as all_gather_tensor."""


class FunctionalCalls:
    """Records functional collectives, once their module has been imported."""

    def __init__(self, recording: FlightRecorder) -> None:
        self.recording = recording
        self.results: dict[int, int] = {}
        """Numbers of operations by the storage of what they return."""
        self.is_recording = False

    def find(self) -> None:
        """Record functional collectives from now on, if their module has been imported."""
        module = sys.modules.get(FUNCTIONAL)
        if self.is_recording or not hasattr(module, "wait_tensor"):
            return
        self.is_recording = True
        places: dict[str, Callable[..., Any]] = {
            name: partial(self.call, known) for name, known in FUNCTIONS.items()
        }
        places |= {"wait_tensor": self.wait, "wait_tensors": self.wait}
        record_also(
            {
                (module, name): calling(each)
                for name, each in places.items()
                if hasattr(module, name)
            }
        )

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A functional collective. It returns at once, and its result is waited for when it is
        used."""
        if torch.compiler.is_compiling():  # dynamo must not trace what follows
            return real(*args, **kwargs)
        box = self.recording.box
        try:
            given = inspect.signature(real).bind(*args, **kwargs).arguments
            group = resolve_group(given["group"], given.get("tag", ""))
            tensor, *_ = given.values()
        except (TypeError, KeyError, ValueError, RuntimeError):  # as torch will say itself
            box = None
        if box is None or not isinstance(tensor, Tensor | list):
            return real(*args, **kwargs)
        dtype: Any = ""
        shape: tuple[int, ...] = ()
        if isinstance(tensor, Tensor):
            dtype, shape = tensor.dtype, tuple(map(int, tensor.shape))
        key = id(group), name, dtype, given.get("src")
        known = box.known.get(key) or self.recording.describe(
            box, key, group, Description(COLLECTIVE, name, dtype=dtype, peer=given.get("src"))
        )
        with self.recording.counted_apart(id(group)):
            call = box.call(known, 4, id(group) in self.recording.limited, shape)
            if self.recording.queues and self.recording.is_on_gpu(group, tensor):
                self.recording.queues.add(box, call, (id(group), None))
            with self.recording.main_thread_in(box, call):
                try:
                    result = real(*args, **kwargs)
                except BaseException:
                    box.take_back(call, known)
                    raise
            if self.recording.find_unseen(id(group)) < 0:  # it was traced, and has called nothing
                box.take_back(call, known)
        for each in result if isinstance(result, list) else [result]:
            self.results[storage_of(each)] = call
        return result

    def wait(self, real: Callable[..., Any], waited: Any) -> Any:
        box = None if torch.compiler.is_compiling() else self.recording.box
        if box is None or not self.results:
            return real(waited)
        parts = waited if isinstance(waited, list) else [waited]
        found = [self.results.pop(storage_of(each), NONE) for each in parts]
        calls = [call for call in found if call != NONE]
        if self.recording.queues and box.words[GPU]:
            for call in calls:
                self.recording.queues.hold(call)
        with self.recording.main_thread_in(box, calls[-1]) if calls else contextlib.nullcontext():
            result = real(waited)
        for call in calls:
            box.end(call)
        return result


def storage_of(result: Any) -> int:
    """A number of the memory that a functional collective's result, or its wrapper, is in."""
    return memory_of(getattr(result, "elem", result))
