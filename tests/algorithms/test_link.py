"""A simulated link: nothing is faster than its bytes, and nothing else changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from ranks import needs_native_calls
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import link, load_all_reduce
from playground.algorithms.link import Link
from playground.tap import observing
from playground.tap.replacement import replaced
from playground.training.sync import OverlappedSync

GBIT, NBYTES = 0.001, 4000
"""A tensor of so many bytes takes 32 ms, times what an all-reduce sends of it."""


def two_at_once(rank: int, size: int, algorithm: str) -> tuple[list[float], float, float]:
    """What two all-reduces that were started together leave, and the least that they took."""
    over_link, tensor = Link(GBIT).all_reduce(load_all_reduce(algorithm)), torch.ones(NBYTES // 4)
    started = time.monotonic()
    first = over_link(tensor, async_op=True)
    second = over_link(torch.ones(NBYTES // 4), async_op=True)
    first.wait()
    after_first = time.monotonic() - started
    second.wait()
    over_link(tensor)
    return tensor[:2].tolist(), after_first, time.monotonic() - started


@pytest.mark.parametrize(("algorithm", "size"), [("backend", 2), ("ring", 3)])
def test_messages_go_one_after_the_other(algorithm: str, size: int, world: Worlds) -> None:
    for values, after_first, after_all in world(size).run(two_at_once, algorithm):
        assert values == [size * size] * 2
        each = 2 * (size - 1) / size * NBYTES * 8e-9 / GBIT
        assert after_first >= each
        assert after_all >= 3 * each


def all_reduce_and_message(rank: int, size: int) -> float:
    """The least that two calls took which the link has observed."""
    tensor = torch.ones(NBYTES // 4)
    started = time.monotonic()
    with observing(Link(GBIT)):
        dist.all_reduce(tensor)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    return time.monotonic() - started


def test_calls_that_block_take_as_long_as_their_bytes(world: Worlds) -> None:
    """An all-reduce of two ranks sends the tensor once, and so does a message, of its sender."""
    sender, receiver = world(2).run(all_reduce_and_message)
    assert sender >= 2 * NBYTES * 8e-9 / GBIT
    assert receiver >= NBYTES * 8e-9 / GBIT


def gradients(rank: int, size: int, link: Link | None) -> list[list[float]]:
    """Those of three ways, after one backward."""
    found = []
    for way in ("overlapped", "ddp"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        sync = None
        if way == "ddp":
            model = DistributedDataParallel(model)
            if link:
                link.put_under(model)
        else:
            sync = OverlappedSync(
                model, link.all_reduce(dist.all_reduce) if link else dist.all_reduce, 32
            )
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
        if sync:
            sync.after_backward()
        found.append(
            [value for param in model.parameters() for value in param.grad.flatten().tolist()]
        )
    return found


def test_gradients_are_the_same(world: Worlds) -> None:
    assert world(2).run(gradients, Link(1.0)) == world(2).run(gradients, None)


def order_of_waits(rank: int, size: int) -> dict[str, list[str]]:
    """When the link makes the program wait: told in place of sleeping."""
    told: list[str] = []
    noted = lambda moment: told.append("waits") if moment > 0 else None  # noqa: E731
    model = DistributedDataParallel(nn.Linear(3, 2))
    hooked = DistributedDataParallel(nn.Linear(3, 2))
    hooked.register_comm_hook(None, allreduce_hook)
    found = {}

    def asynchronous() -> None:
        work: Any = dist.all_reduce(torch.ones(2), async_op=True)
        told.append("computes")
        work.wait()

    def future() -> None:
        work: Any = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        told.append("computes")
        future.wait()

    def functional() -> None:
        total = _functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        told.append("computes")
        total + 1

    def batch() -> None:
        other = 1 - rank
        calls = [dist.P2POp(dist.isend, torch.ones(2), other)]
        calls += [dist.P2POp(dist.irecv, torch.ones(2), other)]
        works = dist.batch_isend_irecv(calls)
        told.append("computes")
        for work in works:
            work.wait()

    def subgroup() -> None:
        dist.all_reduce(torch.ones(2), group=group)

    def backward(model: nn.Module) -> None:
        loss = model(torch.ones(2, 3)).sum()
        told.clear()  # what forward broadcasts
        loss.register_hook(lambda _: told.append("computes"))
        loss.backward()

    group = dist.new_group([0, 1])
    programs: dict[str, Callable[[], None]] = {
        "asynchronous": asynchronous, "future": future, "functional": functional, "batch": batch,
        "subgroup": subgroup, "ddp": partial(backward, model), "hook": partial(backward, hooked),
    }  # fmt: skip
    with replaced(link, "wait_until", lambda _: noted):
        for name, program in programs.items():
            with observing(Link(GBIT)):
                told.clear()
                program()
            found[name] = [*told]
    return found


@needs_native_calls
def test_a_program_computes_until_it_waits(world: Worlds) -> None:
    """What was begun goes over the link meanwhile. A receive is not delayed."""
    for found in world(2).run(order_of_waits):
        assert found.pop("subgroup") == ["waits"]
        assert set(map(tuple, found.values())) == {("computes", "waits")}, found
