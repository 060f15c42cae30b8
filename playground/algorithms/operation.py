"""What all algorithms share: `all_reduce` in place, for any tensor, operation and group, of which each is one form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import background
from playground.algorithms.messages import Messages
from playground.runtime.backends import backend_of

Op = dist.ReduceOp.RedOpType
Add = Callable[[torch.Tensor, torch.Tensor], object]
"""Adds the second tensor to the first, in place, whatever adding is in this operation."""
Algorithm = Callable[[torch.Tensor, Add, Messages], None]
"""Leaves in a flat tensor, on every rank, the sum over all."""

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
BITWISE = (Op.BAND, Op.BOR, Op.BXOR)


class AllReduce:
    """An algorithm as a function with the signature and the meaning of `dist.all_reduce`."""

    def __init__(self, algorithm: Algorithm) -> None:
        functools.update_wrapper(self, algorithm)
        self.algorithm = algorithm

    def __call__(
        self, tensor: torch.Tensor, op: Any = Op.SUM, group: Any = None, async_op: bool = False
    ) -> background.Work | None:
        """Leave in `tensor`, on every rank of `group`, what `op` makes of all their tensors.

        Any shape and layout, the same on every rank. A rank outside the group does nothing. With `async_op` it goes on
        while the caller does something else, until `wait()` of what is returned. Raises `ValueError` for an operation
        that is not defined for this type.
        """
        op = kind(op)
        check(tensor.dtype, op)
        group = group or dist.group.WORLD
        call = functools.partial(self.run, tensor, op, group)
        if async_op:
            member = group != dist.GroupMember.NON_GROUP_MEMBER
            return background.start(call, in_thread=not member or backend_of(group).allows_threads)
        background.finish()
        call()
        return None

    def run(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        """Do it, here and now."""
        if group == dist.GroupMember.NON_GROUP_MEMBER or group.size() == 1:
            return
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = real.contiguous().view(-1)
        add = ADDS[op]
        with torch.no_grad():
            self.algorithm(flat, lambda mine, theirs: add(mine, theirs, out=mine), Messages(flat, group))
            if op == Op.AVG:
                flat /= group.size()
            if flat.data_ptr() != real.data_ptr():
                real.copy_(flat.view(real.shape))


def kind(op: Any) -> Any:
    """SUM, MAX, …: what `dist.ReduceOp.SUM` stands for, however torch has wrapped it."""
    return getattr(op, "op", op)


def check(dtype: torch.dtype, op: Any) -> None:
    """Raise `ValueError` unless `op` is defined for tensors of this type, and done by our algorithms."""
    op = kind(op)
    if op not in ADDS:
        raise ValueError(f"{op} is not among the operations of our algorithms: {', '.join(each.name for each in ADDS)}")
    fractions = dtype.is_floating_point or dtype.is_complex
    if op in BITWISE and fractions:
        raise ValueError(f"{op.name} is defined for integers, not for {name_of(dtype)}")
    if op == Op.AVG and not fractions:
        raise ValueError(
            f"AVG is defined for floating point, not for {name_of(dtype)}: an average need not be a whole number"
        )
    if dtype.is_complex and op not in (Op.SUM, Op.AVG):
        raise ValueError(f"{op.name} is not defined for {name_of(dtype)}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
