"""An algorithm as a collective: for any tensor, operation and group, with the signature that
torch.distributed has.

An algorithm itself is a function of a flat tensor of real numbers, an operation other than AVG, and
a process group. It writes memory as gloo does, below what torch does for a program: no version of a
tensor is counted up, autograd and inference mode do not see it, and neither does a mode or a
default device of the program's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from playground.algorithms import background
from playground.algorithms.executor import CollectiveCall, Group, executor
from playground.algorithms.operation import Op, check, kind, name_of
from playground.base.upstream import below_autograd


class AllReduce:
    """Makes an algorithm a function like `dist.all_reduce`: `algorithm(flat, op, group)` leaves the
    sum over all ranks in a flat tensor. A rank outside the group does nothing; with `async_op` the
    call goes on while the caller does something else, until `wait()` of what is returned."""

    def __init__(self, algorithm: Callable[..., None]) -> None:
        self.algorithm = algorithm
        self.__doc__ = algorithm.__doc__

    def __call__(
        self, tensor: torch.Tensor, op: Any = Op.SUM, group: Group = None, async_op: bool = False
    ) -> background.Work | None:
        """Leave in `tensor`, on every rank of `group`, what `op` makes of all their tensors.

        Any shape and layout, the same on every rank. Raises `ValueError` for an operation that is
        not defined for this type.
        """
        op = kind(op)
        check(tensor.dtype, op)

        def call(group: Group) -> None:
            if (size := group.size()) > 1:
                all_reduce_by(by_executor(self.algorithm, op, group), tensor, op, size)

        return run_collective(
            f"all_reduce ({self.algorithm.__name__})", call, tensor, tensor, group, async_op
        )


OnFlat = Callable[[torch.Tensor], object]
"""Does something with a flat, contiguous tensor of real numbers, in place."""


def by_executor(algorithm: Callable[..., None], *arguments: Any) -> OnFlat:
    """The algorithm with these arguments, by the executor in use when it is called."""
    return lambda flat: executor().run(algorithm, flat, *arguments)


def on_flat(do: OnFlat, tensor: torch.Tensor) -> None:
    """Do it with any tensor."""
    with below_autograd(), DisableTorchFunction():
        real = as_real(tensor)
        flat = real if real.dim() == 1 and real.is_contiguous() else real.contiguous().view(-1)
        do(flat)
        if flat.data_ptr() != real.data_ptr():
            once(real).copy_(once(flat.view(real.shape), real.stride()))


def once(tensor: torch.Tensor, strides: Sequence[int] = ()) -> torch.Tensor:
    """Each place in memory once, where a tensor with these strides, its own if none are given, is
    an expanded one."""
    return tensor[
        tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides or tensor.stride())
    ]


def all_reduce_by(reduce: OnFlat, tensor: torch.Tensor, op: Any, size: int) -> None:
    """All-reduce of any tensor over `size` ranks, by one that adds flat tensors where `op` is
    AVG."""

    def average(flat: torch.Tensor) -> None:
        reduce(flat)
        flat /= size

    on_flat(average if op == Op.AVG else reduce, tensor)


def reduce_scatter_by(
    reduce: OnFlat, output: torch.Tensor, input: torch.Tensor, op: Any, rank: int, size: int
) -> None:
    """The same for a reduce-scatter, which leaves the share of this rank where it is in a flat
    tensor."""
    with below_autograd(), DisableTorchFunction():
        flat = as_real(input).clone(memory_format=torch.contiguous_format).view(-1)
        reduce(flat)
        share, real = flat.tensor_split(size)[rank], as_real(output)
        if op == Op.AVG:
            share /= size
        real.copy_(share.view(real.shape))


def all_gather_by(
    gather: OnFlat, output: torch.Tensor, input: torch.Tensor, rank: int, size: int
) -> None:
    """The same for an all-gather, which finds the share of this rank where it is in a flat
    tensor."""

    def put_and_gather(flat: torch.Tensor) -> None:
        flat.tensor_split(size)[rank].copy_(as_real(input).reshape(-1))
        gather(flat)

    on_flat(put_and_gather, output)


def run_collective(
    name: str, call: Callable[[Group], None], input: torch.Tensor, output: torch.Tensor,
    group: Group, async_op: bool,
    shares: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> background.Work | None:  # fmt: skip
    """Call `call` with the group: now, or in the background. Outside the group, do nothing.

    Raises `ValueError` unless the first of `shares`, if there are any, is as large as the second on
    all ranks together.
    """
    group = group or dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        nothing = background.Work()
        nothing.finish(None)
        return nothing if async_op else None
    if shares:
        check_shares(*shares, group.size())
    made = CollectiveCall(name, partial(call, group), input, output, group, async_op)
    return executor().collective(made)


def check_shares(whole: torch.Tensor, share: torch.Tensor, size: int) -> None:
    """Raise `ValueError` unless `whole` holds as much as `share` on all ranks together."""
    if whole.dtype != share.dtype:
        raise ValueError(
            f"{name_of(whole.dtype)} and {name_of(share.dtype)}: input and output must have the "
            "same type"
        )
    if whole.numel() != size * share.numel():
        raise ValueError(
            f"{whole.numel()} elements are not {size} shares of {share.numel()}: every rank's "
            "share has the same size"
        )


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
