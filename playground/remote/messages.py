"""The messages of a remote call: any object that pickles, with its tensors and arrays sent from memory to memory.

The first message is an envelope of fixed size, so that a rank that knows nothing of the object can receive it. It has
the number of the call, the length of the pickle and the number of buffers; then the pickle and the sizes of the
buffers, if there is room; otherwise they are the next message. The buffers follow, one message each: the memory of
tensors and arrays, which a pickle would copy twice. Small ones are in the pickle, which is read when all have arrived.
Source: pickle protocol 5 with out-of-band data, https://peps.python.org/pep-0574/
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
"""Size in bytes; one of 64 would take gloo as long."""
SMALL = 1024
"""Bytes up to which a buffer is in the pickle."""
HEADER = struct.Struct("<qQQ")
"""Number of the call, number of buffers, bytes of the pickle and of the sizes behind it."""
ROOM = ENVELOPE - HEADER.size
SIZE = struct.calcsize("<Q")
EMPTY = bytes(ENVELOPE)
TENSOR = bytearray(1)
"""Replaces a larger tensor's memory in the pickle, as a tensor is not a buffer."""

Messages = list[torch.Tensor]
Receive = Callable[[Messages], Any]
"""Fills memory with the next messages."""
Lend = Callable[[Any], Any]
"""Reduces an object that must not be copied, as `__reduce__` does; returns `NotImplemented` for any other."""


class Encoder(pickle.Pickler):
    """Pickles into `file`, and appends larger buffers to `buffers`; tensors and lent objects in its own way. Raises
    `UsageError` for a tensor on an accelerator, and what pickle raises for what cannot be pickled."""

    def __init__(self, file: io.BytesIO, buffers: Messages, lend: Lend) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: travels_inside(buffer, buffers))
        self.buffers, self.lend = buffers, lend

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild `obj`; `NotImplemented` leaves it to pickle."""
        return reduce_tensor(obj, self.buffers) if isinstance(obj, torch.Tensor) else self.lend(obj)


def travels_inside(buffer: pickle.PickleBuffer, buffers: Messages) -> bool:
    """Whether a buffer is pickled; otherwise append it to `buffers`. (torch accepts no read-only memory.)"""
    memory = buffer.raw()
    if memory.obj is TENSOR:
        return False
    if memory.nbytes <= SMALL or memory.readonly:
        return True
    buffers.append(torch.frombuffer(memory, dtype=torch.uint8))
    return False


def encode(number: int, obj: Any, lend: Lend) -> Messages:
    """The messages with `obj`, the envelope first. Large buffers are not copied. Raises what `Encoder` raises."""
    buffers: Messages = []
    file = io.BytesIO(EMPTY)
    file.seek(HEADER.size)
    Encoder(file, buffers, lend).dump(obj)
    if buffers:
        file.write(struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers)))
    length, inside = file.tell() - HEADER.size, file.getbuffer()
    HEADER.pack_into(inside, 0, number, len(buffers), length)
    envelope = torch.frombuffer(inside, dtype=torch.uint8, count=ENVELOPE)
    if length <= ROOM:
        return [envelope, *buffers]
    return [envelope, torch.frombuffer(inside, dtype=torch.uint8, offset=HEADER.size), *buffers]


class Envelope:
    """The first message: the call's `number`, and the sizes of the rest."""

    def __init__(self, receive: Receive) -> None:
        inside = bytearray(ENVELOPE)
        receive([torch.frombuffer(inside, dtype=torch.uint8)])
        self.number, self.count, self.length = HEADER.unpack_from(inside)
        self.body = memoryview(inside)[HEADER.size :]

    def receive_rest(self, receive: Receive) -> Any:
        """Receive the object. `receive` fills memory with the following messages, in order.

        Raises `ValueError` if the envelope is inconsistent, `RuntimeError` if there is too little memory, and any
        exception of unpickling the object.
        """
        if self.count * SIZE > self.length:
            raise ValueError(f"no envelope: the sizes of {self.count} buffers in {self.length} bytes")
        body = self.body
        if self.length > ROOM:
            memory = torch.empty(self.length, dtype=torch.uint8)
            receive([memory])
            body = memory.numpy().data
        if not self.count:
            return pickle.loads(body)
        sizes = struct.unpack_from(f"<{self.count}Q", body, self.length - self.count * SIZE)
        buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        receive(buffers)
        return pickle.loads(body, buffers=[buffer.numpy() for buffer in buffers])


def decode(messages: Messages) -> Any:
    """A copy of the object in the messages."""
    coming = iter(messages)

    def receive(memories: Messages) -> None:
        for memory in memories:
            memory.copy_(next(coming).view(-1).view(torch.uint8))

    return Envelope(receive).receive_rest(receive)


def reduce_tensor(tensor: torch.Tensor, buffers: Messages) -> Any:
    """How to rebuild a plain tensor, or a parameter, from its elements: without its graph, but a leaf still requires a
    gradient if it did.

    All others (sparse, quantized, nested, on the meta device, of a subclass, with attributes of their own) are left to
    torch's `__reduce_ex__`, which reduces them to plain ones, or copies.
    """
    if not (tensor.is_cpu or tensor.is_meta):
        raise UsageError(f"a tensor on {tensor.device} in a remote call: these carry CPU tensors, use .cpu()")
    rebuild = REBUILD.get(type(tensor))
    special = tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested
    if special or not rebuild or tensor.__dict__:
        return NotImplemented
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if elements.nbytes > SMALL:
        buffers.append(elements)
        memory = TENSOR
    else:
        memory = elements.as_strided((elements.numel(),), (1,)).view(torch.uint8).numpy()  # strides of 0 or 1 vary
    requires_grad = tensor.requires_grad and tensor.is_leaf
    return rebuild, (pickle.PickleBuffer(memory), str(tensor.dtype)[6:], tuple(tensor.shape), requires_grad)


def rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A tensor whose memory is `buffer`."""
    kind = getattr(torch, dtype)
    tensor = torch.frombuffer(buffer, dtype=kind).view(shape) if len(buffer) else torch.empty(shape, dtype=kind)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_parameter(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(rebuild_tensor(buffer, dtype, shape, False), requires_grad)


REBUILD = {torch.Tensor: rebuild_tensor, torch.nn.Parameter: rebuild_parameter}
