"""The reduction operations (`dist.ReduceOp`) that our algorithms support, and the dtypes they are
defined for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Op = dist.ReduceOp.RedOpType

ADDS: dict[Any, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # and a division at the end
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def kind(op: Any) -> Any:
    """SUM, MAX, …: what `dist.ReduceOp.SUM` stands for, however torch has wrapped it."""
    return getattr(op, "op", op)


@functools.cache  # as every collective asks; what is raised is not kept
def check(dtype: torch.dtype, op: Any) -> None:
    """Raise `ValueError` unless `op`, a `kind`, is defined for tensors of this type, and done by
    our algorithms."""
    if op not in ADDS:
        raise ValueError(
            f"{op} is not among the operations of our algorithms: "
            f"{', '.join(each.name for each in ADDS)}"
        )
    fractions = dtype.is_floating_point or dtype.is_complex
    if op in (Op.BAND, Op.BOR, Op.BXOR) and fractions:
        raise ValueError(f"{op.name} is defined for integers, not for {name_of(dtype)}")
    if op == Op.AVG and not fractions:
        raise ValueError(
            f"AVG is defined for floating point, not for {name_of(dtype)}: an average need not be "
            "a whole number"
        )
    if dtype.is_complex and op not in (Op.SUM, Op.AVG):
        raise ValueError(f"{op.name} is not defined for {name_of(dtype)}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
