"""What can be sent: tensors of every type and layout, arrays and objects, there and back, are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st

from playground.remote.agent import ENVELOPE, Agent
from playground.testing import World

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "int8", "int16", "int32", "int64", "uint8", "bool"),
    *("float8_e4m3fn", "uint16"),
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
    "strided": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "leaf": lambda tensor: tensor.requires_grad_() if tensor.dtype == torch.float32 else tensor,
    "computed": lambda tensor: tensor.requires_grad_() * 1 if tensor.dtype == torch.float32 else tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, tensor.dtype == torch.float32),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(40).to_sparse(),
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
    plain = tensor.detach().to_dense().resolve_conj().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def check_equal(one: Any, other: Any) -> None:
    """`other` has been sent: it is `one`, without the graph it was part of."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert (other.requires_grad, other.is_leaf) == (one.requires_grad and one.is_leaf, True)
        assert bytes_of(one) == bytes_of(other)
    elif isinstance(one, dict):
        check_equal([*one.items()], [*other.items()])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            check_equal(mine, its)
    else:
        assert repr(one) == repr(other)


def echo(obj: Any) -> Any:
    return obj


def exchange(rank: int, size: int, examples: int) -> None:
    """Rank 0 sends objects, and has rank 1 send them back and make them."""
    tensors = st.tuples(
        st.sampled_from(DTYPES), st.lists(st.integers(0, 12), max_size=4), st.sampled_from(sorted(LAYOUTS))
    )

    @hypothesis.seed(0)
    @given(recipes=st.lists(tensors, max_size=3), to=st.sampled_from([1, 1, 0]))
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def send(recipes: list[Any], to: int) -> None:
        sent = [build(*recipe) for recipe in recipes]
        check_equal(sent, agent.call(to, echo, sent))
        for recipe in recipes[:1]:
            check_equal(sent[0].detach().requires_grad_(sent[0].requires_grad and sent[0].is_leaf)
                        if type(sent[0]) is torch.Tensor else sent[0], agent.call(to, build, *recipe))  # fmt: skip

    with Agent() as agent:
        if rank == 0:
            send()
            for make in OTHERS.values():
                check_equal(make(), agent.call(1, echo, make()))
        dist.barrier()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of sparse tensors
@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.stress)])
def test_objects_there_and_back_are_equal(examples: int, world: Callable[..., World]) -> None:
    assert world(2, timeout=120).run(exchange, examples) == [None, None]
