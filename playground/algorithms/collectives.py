"""An algorithm as a collective: for any tensor, operation and group, with the signature that torch.distributed has.

An algorithm itself sees only a flat tensor, what adding is, and the messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import background
from playground.algorithms.messages import Messages
from playground.algorithms.operation import Add, Op, adder, check, kind, name_of
from playground.algorithms.transport import Transport
from playground.algorithms.transports import transport_of

ReducingAlgorithm = Callable[[torch.Tensor, Add, Messages], None]
"""All-reduce: leaves the sum over all ranks in a flat tensor. Reduce-scatter: on rank r, in the r-th of N equal shares
of it; what the other shares then hold does not matter."""
GatheringAlgorithm = Callable[[torch.Tensor, Messages], None]
"""Takes rank r's r-th of N equal shares of a flat tensor to all ranks."""


class AllReduce:
    """An algorithm as a function with the signature and the meaning of `dist.all_reduce`."""

    def __init__(self, algorithm: ReducingAlgorithm) -> None:
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
        return run_collective(functools.partial(self.run, tensor, op), group, async_op)

    def run(self, tensor: torch.Tensor, op: Any, transport: Transport) -> None:
        """Do it, here and now."""
        if transport.size == 1:
            return

        def reduce(flat: torch.Tensor) -> None:
            self.algorithm(flat, adder(op), Messages(flat, transport, op))

        all_reduce_by(reduce, tensor, op, transport.size)


class ReduceScatter:
    """An algorithm as a function with the signature and the meaning of `dist.reduce_scatter_tensor`."""

    def __init__(self, algorithm: ReducingAlgorithm) -> None:
        functools.update_wrapper(self, algorithm)
        self.algorithm = algorithm

    def __call__(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = Op.SUM, group: Any = None, async_op: bool = False
    ) -> background.Work | None:
        """Leave in `output`, on rank r of `group`, the r-th share of what `op` makes of all their `input`s.

        `input` has N times as many elements as `output`, N being the group's size, and stays as it is. A rank outside
        the group does nothing. With `async_op` it goes on while the caller does something else, until `wait()` of what
        is returned. Raises `ValueError` for tensors that do not fit each other, and for an operation that is not
        defined for their type.
        """
        op = kind(op)
        check(input.dtype, op)
        call = functools.partial(self.run, output, input, op)
        return run_collective(call, group, async_op, whole=input, share=output)

    def run(self, output: torch.Tensor, input: torch.Tensor, op: Any, transport: Transport) -> None:
        """Do it, here and now."""

        def reduce(flat: torch.Tensor) -> None:
            self.algorithm(flat, adder(op), Messages(flat, transport, op))

        reduce_scatter_by(reduce, output, input, op, transport.rank, transport.size)


class AllGather:
    """An algorithm as a function with the signature and the meaning of `dist.all_gather_into_tensor`."""

    def __init__(self, algorithm: GatheringAlgorithm) -> None:
        functools.update_wrapper(self, algorithm)
        self.algorithm = algorithm

    def __call__(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> background.Work | None:
        """Leave in `output`, on every rank of `group`, the `input`s of all, in the order of the ranks.

        `output` has N times as many elements as `input`, N being the group's size. A rank outside the group does
        nothing. With `async_op` it goes on while the caller does something else, until `wait()` of what is returned.
        Raises `ValueError` for tensors that do not fit each other.
        """
        call = functools.partial(self.run, output, input)
        return run_collective(call, group, async_op, whole=output, share=input)

    def run(self, output: torch.Tensor, input: torch.Tensor, transport: Transport) -> None:
        """Do it, here and now."""

        def gather(flat: torch.Tensor) -> None:
            self.algorithm(flat, Messages(flat, transport))

        all_gather_by(gather, output, input, transport.rank, transport.size)


OnFlat = Callable[[torch.Tensor], object]
"""Does something with a flat, contiguous tensor of real numbers, in place."""


def on_flat(do: OnFlat, tensor: torch.Tensor) -> None:
    """Do it with any tensor."""
    real = as_real(tensor)
    flat = real if real.dim() == 1 and real.is_contiguous() else real.contiguous().view(-1)
    with no_grad_for(tensor):
        do(flat)
        if flat.data_ptr() != real.data_ptr():
            once(real).copy_(once(flat.view(real.shape), real.stride()))


def no_grad_for(tensor: torch.Tensor) -> Any:
    """Where this tensor can be changed: in any thread, also if it has been made in inference mode."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


def once(tensor: torch.Tensor, strides: Sequence[int] = ()) -> torch.Tensor:
    """Each place in memory once, where a tensor with these strides, its own if none are given, is an expanded one."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides or tensor.stride())]


def all_reduce_by(reduce: OnFlat, tensor: torch.Tensor, op: Any, size: int) -> None:
    """All-reduce of any tensor over `size` ranks, by one that adds flat tensors where `op` is AVG."""

    def average(flat: torch.Tensor) -> None:
        reduce(flat)
        flat /= size

    on_flat(average if op == Op.AVG else reduce, tensor)


def reduce_scatter_by(reduce: OnFlat, output: torch.Tensor, input: torch.Tensor, op: Any, rank: int, size: int) -> None:
    """The same for a reduce-scatter, which leaves the share of this rank where it is in a flat tensor."""
    with no_grad_for(output):
        flat = as_real(input).clone(memory_format=torch.contiguous_format).view(-1)
        reduce(flat)
        share, real = flat.tensor_split(size)[rank], as_real(output)
        if op == Op.AVG:
            share /= size
        real.copy_(share.view(real.shape))


def all_gather_by(gather: OnFlat, output: torch.Tensor, input: torch.Tensor, rank: int, size: int) -> None:
    """The same for an all-gather, which finds the share of this rank where it is in a flat tensor."""

    def put_and_gather(flat: torch.Tensor) -> None:
        flat.tensor_split(size)[rank].copy_(as_real(input).reshape(-1))
        gather(flat)

    on_flat(put_and_gather, output)


def run_collective(
    call: Callable[[Transport], None], group: Any, async_op: bool, whole: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> background.Work | None:  # fmt: skip
    """Call `call` with the group's transport: now, or in the background. Outside the group, do nothing.

    Raises `ValueError` unless `whole` is as large as `share` on all ranks together.
    """
    group = group or dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return background.start(background.Calls(), lambda: None, in_thread=False) if async_op else None
    transport, calls = transport_of(group), background.calls_of(group)
    if whole is not None and share is not None:
        check_shares(whole, share, transport.size)
    if async_op:
        return background.start(calls, functools.partial(call, transport), transport.allows_threads)
    calls.run(functools.partial(call, transport))
    return None


def check_shares(whole: torch.Tensor, share: torch.Tensor, size: int) -> None:
    """Raise `ValueError` unless `whole` holds as much as `share` on all ranks together."""
    if whole.dtype != share.dtype:
        raise ValueError(f"{name_of(whole.dtype)} and {name_of(share.dtype)}: input and output must have the same type")
    if whole.numel() != size * share.numel():
        raise ValueError(
            f"{whole.numel()} elements are not {size} shares of {share.numel()}: every rank's share has the same size"
        )


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
