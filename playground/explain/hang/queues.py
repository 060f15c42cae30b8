"""In a rank: the order of its operations in the streams of its GPU, and what its host waits for.

A call on nccl returns at once. The operation begins when its stream comes to it, and the host
stands still later, where it waits for that stream: in `item()`, in `synchronize()`, at the end. So
the flight recorder is told of each operation which others it is behind, and of each wait of the
host what it waits for. An operation is behind

- what its stream waits for: the operations whose `wait()` was called in that stream, as torch calls
  it for one without `async_op`, and what an event has brought there from another stream;
- the one before it of the same communicator: a message, the one before it to or from the same rank.

What C++ orders is not seen. Then an operation seems to begin earlier than it does, and the host to
wait for less: so nothing is proved that is not so.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from playground.base.host import SIMULATED_GPUS
from playground.base.upstream import current_stream
from playground.explain.hang.box import Box
from playground.explain.hang.box_format import GPU, MOST_BEHIND
from playground.explain.hang.states import DESTROY, Gpu
from playground.tap.replacement import Wrap, calling

Batches = tuple[int, ...]
"""Batches of operations that are waited for, the latest last."""
Communicator = tuple[int, int | None]
"""The id of a group, and the peer of a message."""
Stand = Callable[..., Any]
"""`stand(name, batches, real, *args, **kwargs)` calls `real`, in which the host waits for these."""
READS = (
    "item", "tolist", "cpu", "nonzero", "masked_select", "equal", "allclose", "is_nonzero",
    "__bool__", "__int__", "__float__", "__index__", "__repr__",
)  # fmt: skip
"""Methods of a tensor of a GPU in which the host waits for its current stream."""
FUNCTIONS = "equal", "allclose", "nonzero", "masked_select", "is_nonzero"
"""Functions of torch that do the same for their first tensor."""
COPIES = "to", "cuda"
"""Methods that copy a tensor, maybe from the memory of the host to that of a GPU."""


class Queues:
    """What the streams of this process wait for, as far as Python's calls tell."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.streams: dict[Hashable, Batches] = {}
        self.latest: dict[Communicator, int] = {}
        """The latest batch of each communicator."""
        self.events: WeakKeyDictionary[Any, Batches] = WeakKeyDictionary()
        """What a stream waited for when it recorded an event."""
        self.library = ctypes.CDLL(None) if os.environ.get(SIMULATED_GPUS) else None
        self.here = threading.local()
        """`batch`: the operations of the batch that this thread has begun and not ended."""
        names: dict[tuple[Any, str], Callable[..., Any]] = {
            (torch.cuda, "synchronize"): self.synchronize,
            (torch.accelerator, "synchronize"): self.synchronize,
            (torch.cuda.Stream, "synchronize"): self.synchronize_stream,
            (torch.cuda.Event, "synchronize"): self.synchronize_event,
            (torch.cuda.Event, "record"): self.record_event,
            (torch.cuda.Event, "wait"): self.wait_event,
        }
        names |= {(Tensor, name): partial(self.read, name) for name in READS}
        names |= {(torch, name): partial(self.read, name) for name in FUNCTIONS}
        names |= {(Tensor, name): partial(self.copy, name) for name in COPIES}
        self.places: dict[tuple[Any, str], Wrap] = {
            place: calling(each) for place, each in names.items()
        }

    def begin(self, box: Box) -> None:
        """A world begins whose operations are carried out by a GPU."""
        self.streams.clear()
        self.latest.clear()
        box.words[GPU] = Gpu.SIMULATED if self.library else Gpu.REAL

    def forget_group(self, group: int) -> None:
        """The group with this id is gone, and another may get its id."""
        self.latest = {key: batch for key, batch in self.latest.items() if key[0] != group}

    def add(self, box: Box, call: int, communicator: Communicator, *, ends: bool = True) -> None:
        """An operation is called in the current stream. Without `ends` it has others inside, and is
        the communicator's latest when `hold` is called."""
        begun = getattr(self.here, "batch", None)
        batch = call
        if begun is not None:
            begun.append(call)
            batch = begun[0]
        behind = self.streams.get(current_stream(), ())
        before = self.latest.get(communicator, batch)
        behind = add_last(behind, [before]) if before != batch else behind
        box.put_in_queue(call, batch, behind, is_open=begun is not None)
        if ends:
            self.latest[communicator] = batch

    def hold(self, batch: int, communicator: Communicator | None = None) -> None:
        """The current stream waits for a batch from now on, if that has an end."""
        if communicator is None and getattr(self.here, "batch", None) is not None:
            return
        stream = current_stream()
        self.streams[stream] = add_last(self.streams.get(stream, ()), [batch])
        if communicator is not None:
            self.latest[communicator] = batch

    def find_wait(self, thread: int) -> Batches | None:
        """What a thread of the host waits for in CUDA, whoever has called that; None if it waits
        for nothing there, or nothing tells: a real CUDA does not."""
        if self.library is None:
            return None
        device, handle = ctypes.c_int(), ctypes.c_void_p()
        waits = self.library.simulated_gpu_wait_of(
            thread, ctypes.byref(device), ctypes.byref(handle)
        )
        if not waits:
            return None
        return self.all if waits > 1 else self.streams.get((device.value, handle.value or 0), ())

    def begin_batch(self) -> None:
        self.here.batch = []

    def end_batch(self, box: Box) -> int | None:
        """The operations of the batch begin, together. Returns the batch; None if it has none."""
        begun: list[int] = getattr(self.here, "batch", None) or []
        self.here.batch = None
        for call in begun:
            box.close_batch(call)
        return begun[0] if begun else None

    @property
    def all(self) -> Batches:
        """What the host waits for that waits for all streams."""
        held = (batch for batches in self.streams.values() for batch in batches[-1:])
        return add_last((), sorted({*held, *self.latest.values()}))

    def synchronize(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.stand("synchronize", self.all, real, *args, **kwargs)

    def destroy(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.stand(DESTROY, self.all, real, *args, **kwargs)

    def synchronize_stream(self, real: Callable[..., Any], stream: Any) -> Any:
        return self.stand("synchronize", self.find(stream), real, stream)

    def synchronize_event(self, real: Callable[..., Any], event: Any) -> Any:
        return self.stand("synchronize", self.events.get(event, ()), real, event)

    def record_event(self, real: Callable[..., Any], event: Any, stream: Any = None) -> Any:
        real(event, stream)
        self.events[event] = self.find(stream)

    def wait_event(self, real: Callable[..., Any], event: Any, stream: Any = None) -> Any:
        real(event, stream)
        key = key_of(stream)
        self.streams[key] = add_last(self.streams.get(key, ()), self.events.get(event, ()))

    def find(self, stream: Any) -> Batches:
        """What a stream waits for; None is the current one."""
        return self.streams.get(key_of(stream), ())

    def read(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else None
        if torch.compiler.is_compiling() or not (isinstance(tensor, Tensor) and tensor.is_cuda):
            return real(*args, **kwargs)
        waited = self.streams.get(current_stream(tensor.device.index), ())
        return self.stand(name, waited, real, *args, **kwargs)

    def copy(
        self, name: str, real: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Of a tensor of the host only what is copied as it is: else the host computes first."""
        if torch.compiler.is_compiling() or not (
            tensor.is_cuda or (is_for_gpu(name, args, kwargs) and tensor.is_contiguous())
        ):
            return real(tensor, *args, **kwargs)
        return self.stand(name, self.find(None), real, tensor, *args, **kwargs)


def add_last(batches: Batches, more: Iterable[int]) -> Batches:
    """These batches and more, the latest of them: those are behind the ones before, most often."""
    more = tuple(more)
    return (*(each for each in batches if each not in more), *more)[-MOST_BEHIND:]


def key_of(stream: Any) -> Hashable:
    return current_stream() if stream is None else (stream.device_index, stream.cuda_stream)


def is_for_gpu(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments copy a tensor to a GPU and change nothing else of it."""
    target = args[0] if args else kwargs.get("device")
    if len(args) > 1 or "dtype" in kwargs:
        return False
    if target is None or isinstance(target, int):
        return name == "cuda"
    return isinstance(target, str | torch.device) and torch.device(target).type == "cuda"
