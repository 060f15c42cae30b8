"""Hooks: what a rank calls, in whichever way, its box says."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from torch._subclasses import FakeTensorMode
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from playground.explain.hang import NEW_GROUP, RankState
from playground.explain.hang.activity import look
from playground.explain.hang.box import Box, View, find_boxes
from playground.explain.hang.box_format import Description
from playground.explain.hang.hooks import hooks
from playground.explain.hang.states import BACKWARD, SEND, Channel
from playground.tap.replacement import calling


def read_own() -> RankState:
    (view,) = find_boxes([os.getpid()])
    return view.read()


def call_in_many_ways(rank: int, size: int) -> None:
    ones = torch.ones(1)
    dist.reduce_scatter(torch.ones(1), [ones, ones])
    assert read_own().operations[-1].dtype == "float32"
    dist.new_group([rank], use_local_synchronization=True)
    channel = Channel(NEW_GROUP, (rank,), None, 0, 0)
    assert read_own().counts[channel] == 1, "nobody else is waited for"
    dist.new_group([1, 0])
    made = [one for one in read_own().operations if one.name == NEW_GROUP]
    assert made[-1].members == (0, 1), "in whatever order they are given"
    dist.monitored_barrier()
    hooks.check_groups()
    with hooks.paused():
        dist.all_reduce(ones)
    hooks.check_groups()
    counts, world = read_own().counts, dist.group.WORLD
    assert world
    with pytest.raises((RuntimeError, ValueError)):
        world.allreduce([])
    with FakeTensorMode():
        _functional_collectives.all_reduce(torch.ones(1), "sum", world)
    assert read_own().counts == counts, "what torch refuses, or traces, has not been called"
    work: Any = dist.all_reduce(ones, async_op=True)
    work.get_future().then(lambda future: None).wait()
    assert (found := look())
    assert "callback" not in found.may_act, "it has run"
    assert read_own().unnamed == "", "all is known"
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 1000)
        assert (found := look())
        signal.setitimer(timer, 0)
        assert found.may_act == "what it does when its timer goes off"


def call_inside_backward(rank: int, size: int) -> None:
    """The rank is in the backward pass before, and after, what that calls."""
    model, seen = DistributedDataParallel(torch.nn.Linear(1, 1)), list[Any]()

    def add_up(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(tensor, async_op=True)
        seen.append(read_own().waits_for)
        work.wait()
        seen.append(read_own().waits_for)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    model.register_comm_hook(None, lambda state, bucket: add_up(bucket.buffer()))
    model(torch.ones(1, 1)).sum().backward()
    assert [each.name for each in seen] == [BACKWARD] * 2
    assert read_own().waits_for is None


def send_by_the_group_and_by_its_backend(rank: int, size: int) -> None:
    """The same tensor: of the second message nothing else is seen."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = torch.ones(1)
    if rank == 0:
        dist.send(tensor, 1)
        backend.send([tensor], 1, 0).wait()
    else:
        dist.recv(tensor, 0)
        backend.recv([tensor], 0, 0).wait()
    assert read_own().unnamed == f"what it has called by {'recv' if rank else 'send'} of a backend"


def ask_for_a_backend_in_python(rank: int, size: int) -> None:
    """What the program calls of it passes no method of torch's."""
    find = calling(hooks.get_backend)(lambda group: SimpleNamespace())
    find(dist.group.WORLD)
    assert read_own().unnamed == "what it calls of a backend in Python"


WAYS = (
    call_in_many_ways, call_inside_backward, send_by_the_group_and_by_its_backend,
    ask_for_a_backend_in_python,
)  # fmt: skip


@pytest.mark.parametrize("fn", WAYS)
def test_what_a_rank_calls_is_what_its_box_says(fn: Callable[..., None], world: Worlds) -> None:
    world(2, timeout=300.0).run(fn)  # DDP imports torch's compiler


def take_remote_calls(rank: int, size: int, store: Path) -> tuple[str, str]:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc("alone", rank=rank, world_size=size, rpc_backend_options=options)
    meanwhile = look()
    rpc.shutdown()
    after = look()
    assert meanwhile
    assert after
    return meanwhile.may_act, after.may_act


def test_a_rank_that_takes_remote_calls_may_act(world: Worlds, tmp_path: Path) -> None:
    [(meanwhile, after)] = world(1, fresh=True).run(take_remote_calls, tmp_path / "store")
    assert meanwhile == "whether a remote call comes"
    assert after != meanwhile


def test_threads_that_call_at_the_same_time_are_all_counted() -> None:
    box = Box(0, 2, "a world")
    box.begin_program()
    known = box.describe("send", Description(SEND, SEND, (0, 1), "float32", 1, 7))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [
        threading.Thread(target=lambda: [box.call(known, 1, False) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    state = View(os.getpid(), box.file).read()
    assert state.counts == {(SEND, (0, 1), 1, 7, 0): 20_000}
    assert len({each.index for each in state.operations}) == len(state.operations)
    # a thread held up in a call writes over a later one's
    assert 2048 - len(threads) < len(state.operations) <= 2048
