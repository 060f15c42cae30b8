"""What can be sent: tensors of every type and layout, arrays and objects, there and back, are
equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from playground.lessons.rpc.agent import ENVELOPE, Agent
from playground.testing import World

DTYPES = (
    *(
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "complex64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
    ),
    *("float8_e4m3fn", "uint16"),
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
    "strided": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "computed": lambda tensor: (
        tensor.requires_grad_() * 1 if tensor.dtype == torch.float32 else tensor
    ),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, tensor.dtype == torch.float32),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.nn.BatchNorm1d(1000).state_dict(),
    "array": lambda: np.arange(3000).reshape(30, 100).T,
    "bytes": lambda: bytes(2 * ENVELOPE),
    "error": lambda: ValueError("a result", 3),
}


def build(dtype: str, shape: list[int], layout: str) -> torch.Tensor:
    """A tensor of bytes in a row, as elements of that type."""
    kind, numel = getattr(torch, dtype), torch.Size(shape).numel()
    elements = torch.arange(numel * kind.itemsize) % (2 if kind == torch.bool else 251)
    return LAYOUTS[layout](elements.to(torch.uint8).view(kind).view(shape))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its elements, in order: not-a-numbers too have bytes that can be compared."""
    plain = tensor.detach().resolve_conj().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def check_equal(one: Any, other: Any) -> None:
    """`other` has been sent: it is `one`, without the graph it was part of."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert other.requires_grad == isinstance(one, torch.nn.Parameter) * one.requires_grad
        assert bytes_of(one) == bytes_of(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            check_equal(one[key], other[key])
    else:
        assert repr(one) == repr(other)


def echo(obj: Any) -> Any:
    return obj


def exchange(rank: int, size: int) -> None:
    """Rank 0 sends objects, and has rank 1 send them back and make them."""
    with Agent() as agent:
        if rank == 0:
            for recipe in itertools.product(DTYPES, ([], [0, 2], [3, 4], [40, 70]), LAYOUTS):
                tensor = build(*recipe)
                for to in (0, 1):
                    check_equal(tensor, agent.call(to, echo, tensor))
                check_equal(tensor, agent.call(1, build, *recipe))
            for make in OTHERS.values():
                check_equal(make(), agent.call(1, echo, make()))


def test_objects_there_and_back_are_equal(world: Callable[..., World]) -> None:
    assert world(2).run(exchange) == [None, None]
