"""A call of an operation, as observers are told of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from playground.base.upstream import sender_of
from playground.tap.methods import MESSAGES, METHODS, root_of

_ranks: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def ranks_of(group: Any) -> tuple[int, ...]:
    """The group's ranks in the world, in the group's order; None is the world's. Of a group that
    torch.distributed does not know, as one of torch's RPC, its own ranks."""
    group = group or dist.group.WORLD
    if group not in _ranks:
        try:
            _ranks[group] = tuple(dist.get_process_group_ranks(group))
        except KeyError:
            return tuple(range(group.size()))
    return _ranks[group]


def number_of(group: Any) -> int:
    """A number of the process group: the same on all its ranks, a different one for other groups of
    these ranks."""
    name: str = group.group_name
    return int(name) if name.isdecimal() else zlib.crc32(name.encode())


@dataclass(eq=False)
class Call:
    """A call of an operation by this rank."""

    number: int
    """Its place among the rank's calls, as all observers see them."""
    method: str
    """The method of the process group: a key of `METHODS`."""
    in_group: InitVar[Any]
    """The process group. The call keeps no more than a weak reference to it: threads of gloo keep
    calls, and a group whose last owner is one of its own threads aborts the process."""
    args: Sequence[Any]
    blocks: bool
    """Whether the program gets no work to wait for: it waits in the call, or torch keeps the work
    to itself."""
    is_torchs: bool = False
    """Whether torch keeps the work to itself, and may wait for it later."""
    in_cpp: bool = False
    """Whether C++ has called it: only observers that look inside are told."""
    is_functional: bool = False
    """Whether it is a functional collective called in C++, which `wait_tensor` waits for."""
    has_future: bool = False
    """Whether somebody has asked the work for its future: what it is handed to may wait, unseen."""
    is_polled: bool = False
    """Whether somebody has asked the work whether it is done."""
    work: Any = None
    ranks: tuple[int, ...] = field(init=False)
    """Those of the group in the world, in its order."""
    weak_group: ReferenceType[Any] = field(init=False)

    def __post_init__(self, in_group: Any) -> None:
        self.ranks = ranks_of(in_group)
        self.weak_group = ref(in_group)

    @property
    def group(self) -> Any:
        """The process group; None once it is gone."""
        return self.weak_group()

    @property
    def name(self) -> str:
        """That of the function in torch.distributed: all_reduce, send, isend, …"""
        name = METHODS[self.method].name
        return f"i{name}" if self.method in MESSAGES and not self.blocks else name

    @property
    def is_left_to_backward(self) -> bool:
        """Whether the end of the backward pass that calls it waits for it, if nobody does
        before."""
        return self.has_future or self.is_native

    @property
    def is_native(self) -> bool:
        """Whether C++ calls it by itself, as the backward pass of DistributedDataParallel does."""
        return self.in_cpp and not self.is_functional

    @property
    def waits_in_call(self) -> bool:
        """Whether the program waits for it in the call."""
        return self.blocks and not self.is_torchs

    @property
    def is_asked(self) -> bool:
        """Whether somebody may know that it is over without having waited for the work."""
        return self.has_future or self.is_polled

    @property
    def inputs(self) -> list[torch.Tensor]:
        """This rank's inputs: empty for a scatter on all ranks but the root."""
        return self.tensors(METHODS[self.method].input_at)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """This rank's outputs: empty for a gather on all ranks but the root."""
        return self.tensors(METHODS[self.method].output_at)

    def tensors(self, at: int | None) -> list[torch.Tensor]:
        value = () if at is None else self.args[at]
        if isinstance(value, torch.Tensor):
            return [value]
        return [
            tensor
            for each in value
            for tensor in ([each] if isinstance(each, torch.Tensor) else each)
        ]

    @property
    def number_of_peer(self) -> int | None:
        """The receiver, the sender, or the root, as a number in the group, which may have no such
        rank. None if the call has none, or the sender is anyone."""
        return self.args[1] if self.method in ("send", "recv") else root_of(self.method, self.args)

    @property
    def peer(self) -> int | None:
        """`number_of_peer` as a rank in the world; None if the group has no such rank, too."""
        number = self.number_of_peer
        return None if number is None else dict(enumerate(self.ranks)).get(number)

    @property
    def tag(self) -> int:
        return int(self.args[-1]) if self.method in MESSAGES else 0

    def find_sender(self) -> int:
        """Rank in the world of the one that has sent what was received from anyone, while there is
        the work."""
        return self.ranks[sender_of(self.work())]
