"""Fingerprints of tensors: two that differ belong to tensors that differ.

A fingerprint is the CRC-32 of at most `MOST` elements, at equal distances in memory. The memory of
a CPU's tensor is read where it is: no operator is called that a mode of the program's, autograd or
a profiler would hear of.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from playground.base.upstream import without_modes
from playground.explain.right.log import NO_GRADIENT

MOST = 65_536
"""Elements of which a fingerprint is made."""
MOST_OF_ROW = 4096
"""Bytes of a row of which its fingerprint is made."""
VALUES = {torch.float32: "f", torch.float64: "d", torch.float16: "e"}
"""Types whose elements can be told as numbers, and their formats."""
MOST_VALUES = 64
"""How many parameters there are whose elements are told."""
UNSIGNED: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def find_fingerprint(tensor: Any) -> int | None:
    """At least 1. None if the tensor cannot be read: a subclass, one with gaps in memory, one of
    another device than CPU and CUDA, or one that a CUDA graph is being made of."""
    memory = read_memory(tensor)
    return None if memory is None else zlib.crc32(memory) or 1


def find_row_fingerprints(tensor: Any) -> list[int] | None:
    """Those of its rows, of each the first `MOST_OF_ROW` bytes. None if they cannot be read."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or not tensor.numel():
        return None
    if tensor.layout != torch.strided or not tensor.dim() or not tensor.is_contiguous():
        return None
    width = tensor.numel() * tensor.element_size() // len(tensor)
    memory = (ctypes.c_char * (width * len(tensor))).from_address(tensor.data_ptr())
    octets, most = memoryview(memory).cast("B"), min(width, MOST_OF_ROW)
    starts = range(0, len(octets), width)
    return [zlib.crc32(octets[start : start + most]) or 1 for start in starts]


def read_memory(tensor: Any) -> bytes | memoryview | None:
    """The bytes of at most `MOST` elements."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout != torch.strided or not is_dense(tensor):
        return None
    count, width = tensor.numel(), tensor.element_size()
    if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
        with without_modes(), torch.no_grad():
            flat = torch.as_strided(tensor.detach(), (count,), (1,))
            tensor = flat[:: max(1, -(-count // MOST))].contiguous().cpu()
            count = tensor.numel()
    if tensor.device.type != "cpu":
        return None
    if not count:
        return b""
    end = width * (tensor.storage_offset() + count)
    if tensor.untyped_storage().nbytes() < end:  # it was freed, as those of sharded models are
        return None
    memory = (ctypes.c_char * (count * width)).from_address(tensor.data_ptr())
    if count <= MOST or width not in UNSIGNED:
        return memoryview(memory)[: MOST * width].cast("B").tobytes()
    elements = memoryview(memory).cast("B").cast(UNSIGNED[width])
    sampled: bytes = elements[:: -(-count // MOST)].tobytes()
    return sampled


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements follow each other in memory, in the order of its dimensions or with the
    channels last."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def has_gaps(tensor: Any) -> bool:
    """Whether there is memory between its elements that is not its own. False if that is not known,
    and if elements share memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    if not tensor.numel():
        return False
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    )
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return stride > expected
        expected *= size
    return False


def read_values(tensor: Any) -> list[float]:
    """Its first and its middle element, as numbers; empty if they cannot be told."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype not in VALUES:
        return []
    if tensor.device.type != "cpu" or not tensor.numel() or not is_dense(tensor):
        return []
    form, width = VALUES[tensor.dtype], tensor.element_size()
    places = (0, tensor.numel() // 2)
    if tensor.untyped_storage().nbytes() < width * (tensor.storage_offset() + tensor.numel()):
        return []
    start = tensor.data_ptr()
    found = [struct.unpack(form, ctypes.string_at(start + at * width, width))[0] for at in places]
    return found if all(map(math.isfinite, found)) else []


def print_of_gradient(param: Any) -> int | None:
    return NO_GRADIENT if param.grad is None else find_fingerprint(param.grad)


def values_of_gradients(params: Sequence[Any]) -> list[list[float]]:
    """Two elements of each of the first gradients."""
    return [read_values(param.grad) for param in params[:MOST_VALUES]]


def print_of_generator(model: nn.Module) -> int:
    """The fingerprint of the state of the generator from which the model draws."""
    device = next((param.device for param in model.parameters()), None)
    is_cuda = device is not None and device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes()) or 1
