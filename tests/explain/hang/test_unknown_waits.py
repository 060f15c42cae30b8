"""Whatever the flight recorder cannot name makes a rank unknown: right programs are not accused for
it.

Each waits longer than many looks of an eager launcher's, so that a wrong proof would end it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eager import Looks, eager
from fixtures import Worlds
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from playground import Deadlock
from playground.explain.hang import Kind
from playground.explain.hang.states import BUCKETS

FOREVER = 300.0
LATE = 0.15
"""Seconds: many looks of an eager launcher's."""
SHORT = timedelta(seconds=LATE)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def looks() -> Iterator[Looks]:
    with eager() as looks:
        yield looks


def late(condition: bool = True) -> None:
    time.sleep(LATE * condition)


def check_sum(group: Any = None) -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size(group)] * 2


def ones() -> list[torch.Tensor]:
    return [torch.ones(1)]


def gives_up_after(
    set_timeout: Callable[[dist.ProcessGroup], object],
) -> Callable[[dist.ProcessGroup], object]:
    def wait(group: dist.ProcessGroup) -> None:
        set_timeout(group)
        dist.all_reduce(torch.ones(1), group=group)

    return wait


def options_of(group: dist.ProcessGroup) -> Any:
    options = torch._C._distributed_c10d.AllreduceOptions()
    options.timeout = SHORT
    return options


def set_by_backend(group: dist.ProcessGroup) -> None:
    backend = group._get_backend(CPU)
    (backend.set_timeout if hasattr(backend, "set_timeout") else backend._set_default_timeout)(
        SHORT
    )


LIMITED: dict[str, Callable[[Any], object]] = {
    "dist.set_timeout": gives_up_after(
        lambda group: dist.distributed_c10d.set_timeout(SHORT, group)
    ),
    "ProcessGroup.set_timeout": gives_up_after(lambda group: group.set_timeout(timeout=SHORT)),
    "Backend.set_timeout": gives_up_after(set_by_backend),
    "options by position": lambda group: group.allreduce(ones(), options_of(group)).wait(),
    "options by keyword": lambda group: group.allreduce(
        opts=options_of(group), tensors=ones()
    ).wait(),
    "timeout by position": lambda group: group.allreduce(ones(), dist.ReduceOp.SUM, SHORT).wait(),
    "timeout by keyword": lambda group: group.broadcast(
        tensor=torch.ones(1), root=1, timeout=SHORT
    ).wait(),
    "barrier": lambda group: dist.barrier(group, timeout=SHORT),
    "wait": lambda group: group.allreduce(ones()).wait(timeout=SHORT),
}
"""Ways to wait for a while only: each raises `RuntimeError`."""


def give_up(rank: int, size: int, name: str) -> None:
    group = dist.new_group()
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=group)  # known before its limit changes
        with pytest.raises(RuntimeError):
            LIMITED[name](group)
    else:
        dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.torch(2, 14)] * (name == "dist.set_timeout"))
        for name in LIMITED
    ],
)
def test_a_wait_with_a_limit_of_its_own_is_no_deadlock(name: str, world: Worlds) -> None:
    world(2, timeout=FOREVER).run(give_up, name)


def mixed_with_calls_from_elsewhere(rank: int, size: int = 3) -> None:
    """Two ranks call by other ways than the third: the places of their later calls differ."""
    for call in range(3):
        if rank == 0:
            _functional_collectives.all_reduce(torch.ones(1), "sum", dist.group.WORLD) * 1
        elif rank == call:
            backend: Any = dist.group.WORLD._get_backend(CPU)
            backend.allreduce(ones()).wait()
        else:
            dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 2)
    late(rank == 2)
    dist.barrier()


def messages_of_a_backend(rank: int, size: int = 2) -> None:
    backend: Any = dist.group.WORLD._get_backend(CPU)
    if rank == 0:
        backend.send(ones(), 1, 0).wait()
        late()
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.recv(torch.ones(1), 0)


def thread_called_launcher(rank: int, size: int = 2) -> None:
    def send() -> None:
        late()
        dist.send(torch.ones(1), 1, tag=7)

    if rank == 0:
        for name in ("launcher", "wait for signals", "time limit", "close the process group"):
            threading.Thread(target=send, name=name).start()
    else:
        for _ in range(4):
            dist.recv(torch.ones(1), 0, tag=7)
    check_sum()


def handler_inside_a_call(rank: int, size: int = 2) -> None:
    """A hook of a backward pass waits for what its own rank still has to send to the other."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    output = model(torch.ones(1, 1))
    group = dist.new_group()

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        late()
        dist.send(torch.ones(1), 1, group)
        return gradient

    if rank == 0:
        output.register_hook(hook)
    else:
        dist.recv(torch.ones(1), 0, group)
    output.sum().backward()


def forward_without_backward(rank: int, size: int = 2) -> None:
    """A local backward pass of one rank alone, and one of all after which it sleeps."""
    model, batch = DistributedDataParallel(nn.Linear(1, 1)), torch.ones(1, 1, requires_grad=True)
    model(batch)
    if rank == 0:
        torch.ones(1, requires_grad=True).sum().backward()
        batch.register_hook(lambda gradient: late())
    model(batch).sum().backward()
    late(rank == 0)


def passes_that_average_nothing(rank: int, size: int = 2) -> None:
    """Only what averages gradients counts as a backward pass: rank 0 has more of the others."""
    model, batch = DistributedDataParallel(nn.Linear(1, 1)), torch.ones(1, 1)
    for _ in range(3):
        if rank == 0:
            model.module(batch).sum().backward()
            with model.no_sync():
                model(batch).sum().backward()
            with torch.no_grad():
                model(batch)
            torch.autograd.grad(model(batch).sum(), list(model.parameters()))
            torch.ones(1, requires_grad=True).sum().backward()  # comes to no output of the model
        model(batch).sum().backward()
        late(rank == 1)
    check_sum()


def two_models_and_checkpoints(rank: int, size: int = 2) -> None:
    """Ranks may run the backward passes of two models in one, and recompute in it."""
    from torch.utils.checkpoint import checkpoint

    models = [DistributedDataParallel(nn.Linear(1, 1), static_graph=True) for _ in range(2)]
    batch = torch.ones(1, 1, requires_grad=True)
    for step in range(3):
        losses = [checkpoint(model, batch, use_reentrant=False).sum() for model in models]
        if rank == 0:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()
        late(rank == step == 1)
    check_sum()


def groups_one_after_the_other(rank: int, size: int = 3) -> None:
    """A group gets the place in memory of one that is gone."""
    for number in range(6):
        members = [0, 1] if number % 2 else [1, 2]
        group = dist.new_group(members)
        if rank in members:
            dist.broadcast(torch.ones(1), 1, group)
            late(number == 5 and rank == 0)
            dist.broadcast(torch.ones(1), 1, group)
            dist.destroy_process_group(group)
        del group
    check_sum()


def make_group(name: str, rank: int, size: int) -> Any:
    """A group that torch.distributed does not know of."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    gloo = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(CPU, gloo, dist.ProcessGroupGloo(store, rank, size))
    group._set_default_backend(gloo)
    group._set_group_name("of its own")
    return group


def groups_that_torch_did_not_register(rank: int, size: int = 3) -> None:
    """Their ranks have other numbers, and their names are the same."""
    groups = [make_group(name, (rank + 1) % size, size) for name in "ab"]
    for group in groups if rank == 1 else groups[::-1]:
        group.allreduce(ones())
    groups[1].barrier().wait()
    if rank == 0:
        late()
        groups[0].send(ones(), 2, 0).wait()
    elif rank == 1:
        groups[0].recv(ones(), 1, 0).wait()
    check_sum()


RIGHT = [
    mixed_with_calls_from_elsewhere, messages_of_a_backend, thread_called_launcher,
    handler_inside_a_call,
    forward_without_backward, passes_that_average_nothing, two_models_and_checkpoints,
    groups_one_after_the_other,
    groups_that_torch_did_not_register,
]  # fmt: skip


@pytest.mark.parametrize("fn", RIGHT)
def test_right_programs_that_are_not_seen_through_are_not_accused(
    fn: Callable[..., None], world: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    size = (fn.__defaults__ or (0,))[0]
    assert world(size, timeout=FOREVER).run(fn) == [None] * size
    assert caplog.records == []


def train(rank: int, size: int, batches: tuple[int, ...], how: dict[str, Any]) -> None:
    """The last ranks train so many batches each."""
    members, more = [*range(size - len(batches), size)], dict(how)
    mode, group = more.pop("mode", "train"), dist.new_group(members)
    if rank not in members:
        return
    if more.pop("mesh", False):
        more["device_mesh"] = DeviceMesh.from_group(group, "cpu")
    else:
        more["process_group"] = group
    model = DistributedDataParallel(nn.Linear(1, 1), **more)
    getattr(model, mode)()
    for _ in range(batches[members.index(rank)]):
        model(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize(
    ("size", "batches", "how", "operation"),
    [
        (2, (1, 2), {}, BUCKETS),
        (2, (2, 3), {"mode": "eval"}, "DDP's backward"),
        (3, (1, 2), {"find_unused_parameters": True, "mesh": True}, "DDP's backward"),
    ],
)
def test_unequal_batches_are_proved(
    size: int, batches: tuple[int, ...], how: dict[str, Any], operation: str, world: Worlds
) -> None:
    with pytest.raises(Deadlock) as caught:
        world(size, timeout=FOREVER).run(train, batches, how)
    found = caught.value.diagnosis
    first = size - 2
    assert (found.kind, found.culprits, found.waits) == (
        Kind.ENDED,
        (first,),
        ((first + 1, (first,)),),
    )
    assert operation in str(found)


def hang_beside_pyarrow(rank: int, size: int) -> None:
    if rank == 0:
        import pyarrow  # as do pandas, datasets and accelerate

        assert pyarrow.array([rank]).to_pylist() == [rank]
        dist.barrier()


def test_the_threads_of_pyarrow_call_nothing(world: Worlds) -> None:
    with pytest.raises(Deadlock) as caught:
        world(2).run(hang_beside_pyarrow)
    assert caught.value.diagnosis.kind == Kind.ENDED


def call_by_keyword(rank: int, size: int) -> None:
    """Results and errors are torch's own, whichever way a method is called."""
    group: Any = dist.group.WORLD
    options, tensor = torch._C._distributed_c10d, torch.full((2,), rank + 1.0)
    broadcast = options.BroadcastOptions()
    broadcast.rootRank = 1
    parts, out = [torch.zeros(2), torch.zeros(2)], torch.zeros(4)
    calls: list[tuple[Callable[[], Any], list[torch.Tensor], list[float]]] = [
        (lambda: group.allreduce(tensors=[tensor]), [tensor], [3.0]),
        (
            lambda: group.allreduce(opts=options.AllreduceOptions(), tensors=[tensor]),
            [tensor],
            [6.0],
        ),
        (lambda: group.allreduce(tensor, op=dist.ReduceOp.MAX), [tensor], [6.0]),
        (lambda: group.broadcast([tensor.fill_(rank)], opts=broadcast), [tensor], [1.0]),
        (lambda: group.broadcast(root=1, tensor=tensor.fill_(rank)), [tensor], [1.0]),
        (
            lambda: group.allgather(input_tensor=tensor.fill_(rank), output_tensors=parts),
            parts,
            [0.0, 1.0],
        ),
        (lambda: group._allgather_base(input=tensor, output=out), [*out.view(2, 2)], [0.0, 1.0]),
        (lambda: group.barrier(timeout=timedelta(seconds=FOREVER)), [], []),
    ]
    for call, results, expected in calls:
        call().wait()
        assert [each.tolist() for each in results] == [[value] * 2 for value in expected], expected
    tensor.fill_(rank)
    if rank == 0:
        group.send(tag=3, dstRank=1, tensors=[tensor]).wait()
        group.send([tensor], 1, tag=4).wait()
    else:
        group.recv([tensor], tag=3, srcRank=0).wait()
        group.recv_anysource([tensor], 4).wait()
        assert tensor.tolist() == [0.0, 0.0]
    refused: list[Callable[[], Any]] = [
        lambda: group.send(tensors=[tensor], dst=1, tag=0), lambda: group.send([tensor], 1),
        lambda: group.send(),
        lambda: group.allreduce(tensor=[1]), lambda: group.allreduce([tensor], nothing=1),
        lambda: group.allreduce(),
        lambda: group.broadcast([tensor], 1), lambda: group.recv_anysource(tensors=[tensor], tag=0),
        lambda: group.barrier().wait("soon"), lambda: group.barrier().wait(1, 2),
    ]  # fmt: skip
    for wrong in refused:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            wrong()
    if rank == 0:
        dist.all_reduce(tensor)  # which is proved to be one too many


def test_methods_are_called_by_keyword_as_by_position(world: Worlds) -> None:
    with pytest.raises(Deadlock) as caught:
        world(2, timeout=FOREVER).run(call_by_keyword)
    assert (caught.value.diagnosis.kind, caught.value.diagnosis.culprits) == (Kind.ENDED, (1,))
