"""What a remote call sends: any object that pickles, its tensors beside it, straight from memory to memory.

An object travels as an envelope of fixed size, so that a rank that knows nothing of it yet can receive it. The envelope
holds who sends it, its number, how long the pickled object is, and that object, if there is room; else it follows. The
tensors follow last, one message each: pickling would copy them twice. Small ones travel in the envelope.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from playground.runtime.errors import UsageError

ENVELOPE = 4096
"""Bytes: gloo takes as long for one of 64."""
SMALL = 1024
"""Bytes up to which a tensor travels in the envelope."""
HEADER = struct.Struct("<qqq")
"""Sender, number of the call, length of the pickled object."""
ROOM = ENVELOPE - HEADER.size

Lend = Callable[[Any], Any]
"""Turns an object that must not be copied into what stands for it on the way; None for any other."""


class Encoder(pickle.Pickler):
    """Pickles an object, and keeps its larger tensors in `tensors`, in the order in which the `Decoder` asks for them.

    Raises `UsageError` for a tensor that is not in the CPU's memory.
    """

    def __init__(self, lend: Lend) -> None:
        self.buffer, self.lend = io.BytesIO(), lend
        self.tensors: list[torch.Tensor] = []
        super().__init__(self.buffer, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, obj: Any) -> Any:
        """What stands for `obj` in the pickle; None if it is pickled as usual."""
        if not isinstance(obj, torch.Tensor):
            return self.lend(obj)
        if obj.device.type != "cpu":
            raise UsageError(f"a tensor on {obj.device} in a remote call: these carry CPU tensors, use .cpu()")
        data = obj.detach().contiguous()
        if data.nbytes > SMALL:
            self.tensors.append(data)
            return data.dtype, tuple(data.shape), None
        return data.dtype, tuple(data.shape), data.reshape(-1).view(torch.uint8).numpy().tobytes()

    def encode(self, sender: int, number: int, obj: Any) -> list[torch.Tensor]:
        """The messages, in order."""
        self.dump(obj)
        pickled = self.buffer.getbuffer()
        envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
        inside = envelope.numpy().data
        HEADER.pack_into(inside, 0, sender, number, len(pickled))
        if len(pickled) > ROOM:
            return [envelope, torch.frombuffer(pickled, dtype=torch.uint8), *self.tensors]
        inside[HEADER.size : HEADER.size + len(pickled)] = pickled
        return [envelope, *self.tensors]


class Decoder(pickle.Unpickler):
    """The object in `pickled`; its larger tensors are allocated, and yet to be received into `tensors`."""

    def __init__(self, pickled: Any, borrow: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.borrow = borrow
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: Any) -> Any:
        """What `pid` stands for."""
        if not isinstance(pid[0], torch.dtype):
            return self.borrow(pid)
        dtype, shape, data = pid
        if data is None:
            self.tensors.append(torch.empty(shape, dtype=dtype))
            return self.tensors[-1]
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


class Envelope:
    """What has arrived first: who sent it, the request's number, and `pickled`, which reaches into `rest` if that is
    not None: memory for what is yet to be received."""

    def __init__(self, memory: torch.Tensor) -> None:
        inside = memory.numpy().data
        self.sender, self.number, length = HEADER.unpack_from(inside)
        self.rest = torch.empty(length, dtype=torch.uint8) if length > ROOM else None
        self.pickled = inside[HEADER.size : HEADER.size + length] if self.rest is None else self.rest.numpy().data
