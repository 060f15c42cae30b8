"""Tensors of any shape, memory layout and type, drawn by hypothesis, and whether two are equal."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st

SUMS = ("SUM", "PRODUCT", "MIN", "MAX")
OPS = {
    "float32": (*SUMS, "AVG"),
    "float64": (*SUMS, "AVG"),
    "float16": (*SUMS, "AVG"),
    "bfloat16": (*SUMS, "AVG"),
    "complex64": ("SUM", "AVG"),
    "uint8": (*SUMS, "BAND", "BOR", "BXOR"),
    "int8": (*SUMS, "BAND", "BOR", "BXOR"),
    "int32": (*SUMS, "BAND", "BOR", "BXOR"),
    "int64": (*SUMS, "BAND", "BOR", "BXOR"),
    "bool": ("MIN", "MAX", "BAND", "BOR"),
}
LAYOUTS = ("contiguous", "transposed", "every other")
any_tensor = (
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(LAYOUTS),
    st.sampled_from([(dtype, op) for dtype, ops in OPS.items() for op in ops]),
    st.integers(0, 2**16),
)
few = settings(
    max_examples=3,
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
"""The first example is always the simplest there is, so one alone would not do."""


def data_for(rank: int, shape: list[int], layout: str, dtype: str, seed: int) -> torch.Tensor:
    """A tensor with this rank's numbers, small enough that no sum or product of eight of them
    overflows a float16."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if layout == "every other" and shape:
        shape = [*shape[:-1], 2 * shape[-1]]
    numbers = torch.randint(-2, 3, shape, generator=generator)
    if getattr(torch, dtype).is_floating_point or getattr(torch, dtype).is_complex:
        numbers = numbers + torch.rand(shape, generator=generator) / 4
    tensor = numbers.to(getattr(torch, dtype))
    if layout == "transposed":
        return tensor.t() if tensor.dim() == 2 else tensor.movedim(0, -1) if shape else tensor
    return tensor[..., ::2] if layout == "every other" and shape else tensor


def bits_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    # a contiguous tensor of one element may have any stride
    flat = tensor.new_empty(tensor.numel())
    flat.view(tensor.shape).copy_(tensor)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def agree(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> bool:
    """Whether they are equal; for floating point, up to rounding."""
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, theirs)
    rounding = {"float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-12}.get(dtype, 1e-5)
    return torch.allclose(ours, theirs, rtol=rounding, atol=rounding)
