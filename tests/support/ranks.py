"""What ranks do in several test modules."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms import load_all_reduce
from playground.algorithms.executor import (
    Addressed,
    Group,
    WatchingExecutor,
    Works,
    executed_by,
    number_in_whole,
)
from playground.explain.cost.run import TELLS_OF_NATIVE_CALLS
from playground.world import device, report

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of this torch."""
needs_native_calls = pytest.mark.torch(*TELLS_OF_NATIVE_CALLS)
"""A test looks at what torch calls in C++."""


def add_up(rank: int, size: int) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


def go_wrong(rank: int, size: int, how: str, culprit: int) -> None:
    """Every rank says who it is and waits for the others; the culprit does something else."""
    report(pid=os.getpid())
    dist.barrier()
    if rank == culprit:
        misbehave(how)
    dist.barrier()


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("this rank has had enough")
    if how == "exit":
        sys.exit(3)
    if how == "vanish":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(1000)
    raise AssertionError(how)


def fork_a_talker(rank: int, size: int) -> int:
    """A child of the rank reports, and comes back as if it were the rank: by a result or by an
    exception. It ends as a script does."""
    for comes_back in (True, False):
        child = os.fork()
        if child == 0:
            report(told_by="child")
            if comes_back:
                return -1
            raise ValueError("this is not the rank")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (not comes_back)
    report(told_by="rank")
    return rank


class Listener(WatchingExecutor):
    """Calls `note(send, receive)` before messages of our algorithms are started, with the group's
    numbers of ranks."""

    def __init__(self, note: Callable[[Sequence[Addressed], Sequence[Addressed]], object]) -> None:
        super().__init__()
        self.note = note

    def start(self, group: Group, send: Sequence[Addressed], receive: Sequence[Addressed]) -> Works:
        self.note(number_in_whole(group, send), number_in_whole(group, receive))
        return self.inner.start(group, send, receive)


def observed(
    note: Callable[[Sequence[Addressed], Sequence[Addressed]], object],
) -> contextlib.AbstractContextManager[None]:
    """In this block, `note` is called before messages of our algorithms are started on this
    rank."""
    return executed_by(Listener(note))


def small_model(seed: int) -> nn.Module:
    """A model with every kind of parameter that matters here, in float64, without dropout."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(1, 3, 5), nn.MaxPool2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10)
    )
    return layers.double()


def all_reduce_large(rank: int, size: int, numel: int, names: list[str]) -> dict[str, bool]:
    right = {}
    for name in names:
        ours = torch.arange(numel, dtype=torch.int32, device=device()) * (rank + 1)
        theirs = ours.clone()
        dist.all_reduce(theirs)
        load_all_reduce(name)(ours)
        right[name] = torch.equal(ours, theirs)
    return right


def all_reduce_in_group(
    rank: int, size: int, members: list[int], names: list[str]
) -> dict[str, float]:
    group = dist.new_group(members)
    after = {}
    for name in names:
        tensor = torch.full((5,), rank + 1.0, device=device())
        load_all_reduce(name)(tensor, group=group)
        assert (tensor == tensor[0]).all()
        after[name] = tensor[0].item()
    return after


def several_at_once(rank: int, size: int, name: str) -> list[float]:
    """Asynchronous all-reduces of tensors of many sizes, a synchronous one among them."""
    all_reduce = load_all_reduce(name)
    tensors = [
        torch.full((length,), rank + 1.0 + length, device=device())
        for length in (1, 5, 100_000, 0, 3)
    ]
    works: list[Any] = [all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.full((7,), rank + 1.0, device=device())
    assert all_reduce(last) is None
    assert all(work.wait() and work.is_completed() for work in works)
    assert all((tensor == tensor[0]).all() for tensor in [*tensors, last] if len(tensor))
    return [tensor[0].item() for tensor in [*tensors, last] if len(tensor)]
