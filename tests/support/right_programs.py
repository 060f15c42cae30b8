"""Right programs that look wrong: each makes progress by means that are hard to see from outside,
and checks its own values. None is a deadlock or to be warned of. A program is a function of (rank,
size) and further arguments."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

ROUTINES: list[Any] = []
LATE = 0.3
"""Seconds by which a rank is late: six looks of the launcher's, two of which would prove a
deadlock 0.1 s later."""
SHORT = timedelta(seconds=5)
"""A timeout that passes, and in which a group is formed on a busy machine."""
GIGABYTE = 2**28
"""Elements of float32."""


def late(condition: bool = True) -> None:
    time.sleep(LATE * condition)


def check_sum(group: Any = None) -> None:
    """All members of the group call this."""
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size(group)] * 5


def check_all(tensor: torch.Tensor, value: float) -> None:
    assert (tensor.min(), tensor.max()) == (value, value)


def send(value: float, to: int | None, late_by: float = 0, **more: Any) -> None:
    time.sleep(late_by)
    dist.send(torch.full((3,), float(value)), to, **more)


def receive(value: float, source: int | None = None, **more: Any) -> None:
    tensor = torch.zeros(3)
    dist.recv(tensor, source, **more)
    check_all(tensor, value)


def store() -> Any:
    """Part of the world's store for the program's own keys."""
    return dist.PrefixStore("program", dist.distributed_c10d._get_default_store())


def share(name: str) -> str:
    """The same path on all ranks, in a folder that rank 0 makes."""
    if dist.get_rank() == 0:
        store().set(name, tempfile.mkdtemp())
    return os.path.join(store().get(name).decode(), name)


def start_posix_thread(act: Callable[[], None]) -> None:
    routine, thread = ctypes.CFUNCTYPE(ctypes.c_void_p)(act), ctypes.c_ulong()
    ROUTINES.append(routine)  # lives as long as the thread
    assert ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, routine, None) == 0


START: dict[str, Callable[[Any, Callable[[], None]], Any]] = {
    "thread": lambda future, act: threading.Thread(target=act).start(),
    "unknown_thread": lambda future, act: _thread.start_new_thread(act, ()),
    "posix_thread": lambda future, act: start_posix_thread(act),
    "executor": lambda future, act: ThreadPoolExecutor(1).submit(act),
    "callback": lambda future, act: future.then(lambda _: act()),
    "done_callback": lambda future, act: future.add_done_callback(lambda _: act()),
    "callback_of_a_callback": lambda future, act: future.then(lambda _: 1).then(lambda _: act()),
}
"""Means to have an action done elsewhere."""


def sends_late(rank: int, size: int, start: str, meanwhile: str) -> None:
    """Rank 0 has something send to rank 1 later, and is itself in a collective, asleep or at its
    end."""
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    if rank == 0:
        START[start](future, partial(send, 7, 1, LATE))
    if rank == 1:
        receive(7, 0)
    if meanwhile == "main_in_a_collective":
        check_sum()
    elif meanwhile == "main_asleep":
        late()


def callback_calls_a_collective(rank: int, size: int = 2) -> None:
    for count in (3, 300_000):
        tensor, group = torch.ones(count), dist.new_group()
        future = dist.all_reduce(tensor, async_op=True).get_future()
        future.then(partial(lambda group, _: check_sum(group), group)).wait()
        check_all(tensor, size)


def executor_of_collectives(rank: int, size: int = 2) -> None:
    groups = [dist.new_group() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        late(rank == 1)
        list(pool.map(check_sum, groups if rank else reversed(groups)))


def many_threads_send(rank: int, size: int = 3) -> None:
    """Messages of many threads at once are counted each: rank 0 receives them later."""

    def talk(tag: int) -> None:
        for _ in range(300):
            work = dist.isend(torch.full((3,), float(tag)), (rank + 1) % size, tag=tag)
            receive(tag, (rank - 1) % size, tag=tag)
            work.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))
    late(rank == 0)
    check_sum()


def interpreter_locked_and_process_stopped(rank: int, size: int = 3) -> None:
    if rank == 0:
        ctypes.PyDLL(None).usleep(int(LATE * 1e6))
    check_sum()
    if rank == 1:
        subprocess.run(
            ["sh", "-c", f"kill -STOP {os.getpid()}; sleep {LATE}; kill -CONT {os.getpid()}"]
        )
    check_sum()


def own_rank_first_in_new_group(rank: int, size: int = 3) -> None:
    for local in (False, True):
        late(rank == 2)
        if rank < 2:
            group = dist.new_group([rank, 1 - rank], use_local_synchronization=local)
            late(rank == 1)
            check_sum(group)
        elif not local:
            dist.new_group([1, 0])
    check_sum()


def ranks_from_a_generator(rank: int, size: int = 3) -> None:
    late(rank == 1)
    check_sum(dist.new_group(each for each in range(size)))
    check_sum(dist.new_group({2, 0, 1}))


def receive_before_new_group(rank: int, size: int = 3) -> None:
    late(rank == 1)
    if rank == 2:  # no member, so nobody waits for it in new_group
        receive(7, 0)
    dist.new_group([0, 1])
    if rank == 0:
        send(7, 2)
    check_sum()


def overlapping_groups(rank: int, size: int = 4) -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
    groups = {pair: dist.new_group(pair) for pair in pairs}
    late(rank == 3)
    mine = [groups[pair] for pair in pairs if rank in pair][:: 1 if rank % 2 else -1]
    for work in [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in mine]:
        work.wait()
    check_sum()


def asynchronous_in_opposite_orders(rank: int, size: int = 3) -> None:
    groups, tensors = [dist.new_group(), dist.new_group()], [torch.ones(9), torch.ones(900_000)]
    pairs = list(zip(groups, tensors, strict=True))[:: 1 if rank else -1]
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in pairs]:
        work.wait()
    for tensor in tensors:
        check_all(tensor, size)


def subgroups(rank: int, size: int = 4) -> None:
    first, second = dist.new_subgroups(2)[0], dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])[0]
    if rank < 2:
        late(rank == 1)
        dist.barrier(first)
        send(7, (rank + 2) % size)
    else:
        receive(7, (rank + 2) % size)
    send(8, None, group=second, group_dst=1) if rank in (0, 1) else receive(
        8, None, group=second, group_src=0
    )
    check_sum(second)


def another_number(rank: int, size: int = 3) -> None:
    backend, path = dist.get_backend(), share("again")
    check_sum()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=(rank + 1) % size, world_size=size
    )
    if dist.get_rank() == 0:
        send(7, 1, LATE)
    if dist.get_rank() == 1:
        receive(7, 0)
    check_sum()


def one_world_after_another(rank: int, size: int = 2) -> None:
    for step in range(4):
        dist.destroy_process_group()
        dist.init_process_group(rank=rank, world_size=size)
        late(rank == step == 1)
        check_sum()


def peer_destroys_the_group(rank: int, size: int = 2) -> None:
    if rank == 0:
        late()
        dist.destroy_process_group()
        return
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(1))
        raise AssertionError("there is nobody to add up with")


def asynchronous_call_that_nobody_joins(rank: int, size: int = 2) -> None:
    check_sum()
    if rank == 0:
        dist.all_reduce(torch.ones(300_000), async_op=True)


def uneven_ends(rank: int, size: int = 3) -> None:
    check_sum()
    if rank:
        late(rank == 1)
        (send if rank == 1 else receive)(7, 3 - rank)
        late(rank == 2)
        (receive if rank == 1 else send)(8, 3 - rank)


def retry(rank: int, size: int = 3) -> None:
    calls: list[Callable[[], object]] = [
        lambda: dist.send(torch.ones(1), rank), lambda: dist.all_reduce([1]),
        lambda: os.stat("/nowhere"),
    ]  # fmt: skip
    for number, wrong in enumerate(calls):
        try:
            wrong() if rank == 0 else None
        except (ValueError, TypeError, OSError):
            check_sum()
        else:
            late(rank == 1 and number == 0)
            check_sum()
        finally:
            check_sum()


def alarm_inside_a_collective(rank: int, size: int = 3) -> None:
    """The program catches what its handler raises: later sums are right, or there is an error."""

    def ring(*_: object) -> None:
        raise TimeoutError

    late(rank != 0)
    former = signal.signal(signal.SIGALRM, ring)
    tensor = torch.ones(3)
    with contextlib.suppress(TimeoutError, RuntimeError):
        signal.setitimer(signal.ITIMER_REAL, LATE / 2 if rank == 0 else 0)
        dist.all_reduce(tensor)
    signal.signal(signal.SIGALRM, former)
    for value in (1.0, 10.0, 100.0):
        try:
            dist.all_reduce(tensor.fill_(value))
        except RuntimeError:
            break
        check_all(tensor, value * size)


def timeouts_that_are_caught(rank: int, size: int = 3) -> None:
    groups = [dist.new_group(timeout=SHORT) for _ in range(3)]
    late(rank == 1)
    with contextlib.suppress(RuntimeError):
        dist.monitored_barrier(groups.pop(), timedelta(seconds=LATE / 2))
    if rank == 0:
        for call in (partial(dist.all_reduce, torch.ones(1)), partial(dist.recv, torch.ones(1), 1)):
            with contextlib.suppress(RuntimeError):
                call(group=groups.pop())
    check_sum()


def sleep_in_a_worker(number: int) -> int:
    time.sleep(LATE / 2)
    return number


def processes_of_a_rank(rank: int, size: int = 2) -> None:
    if rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(sleep_in_a_worker, range(2)) == [0, 1]
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({LATE})"], check=True)
        if (child := os.fork()) == 0:
            late()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check_sum()


def workers_of_a_data_loader(rank: int, size: int = 2) -> None:
    data: Any = range(4)
    how: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"} if rank else {}
    for _ in torch.utils.data.DataLoader(
        data, collate_fn=lambda batch: sleep_in_a_worker(batch[0]), **how
    ):
        check_sum()


def waits_for_the_store(rank: int, size: int = 3) -> None:
    group = dist.new_group([0, 1])
    if rank == 2:
        store().wait(["go"])
        send(7, 1)
        while not store().check(["end"]):
            time.sleep(0.01)
    else:
        late(rank == 0)
        check_sum(group)
        store().set("go", "now")
    if rank == 1:
        receive(7, 2)
        late()
        store().set("end", "now")
    check_sum()


def batch_of_messages(rank: int, size: int = 3) -> None:
    tags, incoming = range(20), torch.zeros(20, 3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(tag)), (rank + 1) % size, tag=tag)
        for tag in tags
    ]
    operations += [
        dist.P2POp(dist.irecv, incoming[tag], (rank - 1) % size, tag=tag) for tag in tags
    ]
    late(rank == 1)
    for work in dist.batch_isend_irecv(operations[:: 1 if rank else -1]):
        work.wait()
    assert incoming[:, 0].tolist() == list(tags)
    check_sum()


def from_anyone(rank: int, size: int = 3) -> None:
    for _ in range(2 * (rank == 0)):
        receive(7)
    if rank:
        send(7, 0, LATE * (rank == 2))
    check_sum()


def asynchronous_sum_then_a_message(rank: int, size: int = 2) -> None:
    for count in (3, 100_000):
        tensor = torch.ones(count)
        if rank == 1:
            receive(7, 0)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            send(7, 1)
        work.wait()
        check_all(tensor, size)


def polls_a_work(rank: int, size: int = 2) -> None:
    late(rank == 1)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    check_sum()


def two_thousand_shapes(rank: int, size: int = 3) -> None:
    for count in range(1, 2000):
        dist.all_reduce(torch.ones(count))
    late(rank == 1)
    check_sum()


def large_transfers_and_a_late_member(rank: int, size: int = 4) -> None:
    """Rank 3 comes when rank 2 is done, which gloo allows."""
    tensor = torch.full((GIGABYTE,), float(rank))
    parts = [torch.empty(GIGABYTE // 2) for _ in range(size * (rank == 0))]
    for call in (
        partial(dist.gather, tensor[: GIGABYTE // 2], parts or None),
        partial(dist.broadcast, tensor, 0),
    ):
        if rank == 3:
            receive(7, 2)
        call()
        if rank == 2:
            send(7, 3)
    for value, part in enumerate(parts or [tensor]):
        check_all(part, value)


def large_sum(rank: int, size: int = 2) -> None:
    tensor = torch.ones(2 * GIGABYTE)
    late(rank == 1)
    dist.broadcast(tensor, 1)
    dist.all_reduce(tensor[:GIGABYTE])
    check_all(tensor[:GIGABYTE], size)


def objects_and_uneven_parts(rank: int, size: int = 3) -> None:
    found = [None] * size
    told = [rank] * 2
    mine = [None]
    gathered = [None] * size
    late(rank == 2)
    dist.all_gather_object(found, {"rank": rank, "long": "x" * rank * 1000})
    dist.gather_object(rank, gathered if rank == 1 else None, 1)
    late(rank == 0)
    dist.broadcast_object_list(told, 2)
    dist.scatter_object_list(mine, ["a", "b", "c"] if rank == 0 else None)
    assert told + mine == [2, 2, "abc"[rank]]
    assert gathered == [0, 1, 2] or rank != 1
    incoming, counts = torch.zeros(6), [1, 2, 3]
    late(rank == 1)
    dist.all_to_all_single(
        incoming, torch.full((3 * counts[rank],), float(rank)), counts, [counts[rank]] * size
    )
    assert incoming.tolist() == [0, 1, 1, 2, 2, 2]
    tensors = [torch.ones(3), torch.ones(5)]
    late(rank == 2)
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    check_all(torch.cat(tensors), size)


def expanded_view(rank: int, size: int = 2) -> None:
    tensor = torch.ones(1).expand(4)
    dist.all_reduce(tensor)
    assert tensor[0] in (size, size**4)


def functional_collectives(rank: int, size: int = 3) -> None:
    late(rank == 1)
    total = _functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    every = _functional_collectives.all_gather_tensor(
        torch.full((1,), float(rank)), 0, dist.group.WORLD
    )
    late(rank == 2)
    check_all(total * 1, size)
    assert every.tolist() == list(range(size))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8))


def train(model: nn.Module, rank: int, steps: int = 3, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        late(rank == step == 1)
        optimizer.zero_grad()
        model(torch.full((4, 64), rank + 1.0)).square().mean().backward()
        optimizer.step()


def check_replicas(model: nn.Module) -> None:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(each.equal(flat) for each in every)


def train_with_a_hook(rank: int, size: int, name: str) -> None:
    group = dist.new_group()

    def average(future: Any) -> Any:
        dist.all_reduce(torch.ones(1), group=group)
        return future.value()[0].div_(size)

    def chain(_, bucket):  # type: ignore[no-untyped-def]
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(average)

    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    hooks = {"chain": (None, chain), "fp16": (None, default_hooks.fp16_compress_hook)}
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(*hooks.get(name, (state, powerSGD_hook.powerSGD_hook)))
    train(model, rank, steps=5)
    check_replicas(model)


def uneven_inputs_and_accumulation(rank: int, size: int = 2) -> None:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.005)
    with model.join():
        train(model, rank, steps=3 + 4 * rank)
    with model.no_sync():
        late(rank == 0)
        model(torch.ones(4, 64)).sum().backward()
    train(model, rank)
    check_replicas(model)


def compiled(rank: int, size: int = 2) -> None:
    model = torch.compile(DistributedDataParallel(make_model()), backend="aot_eager")
    train(model, rank)
    check_replicas(model)


def sharded(rank: int, size: int = 2) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model())
    train(
        model,
        rank,
        optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01),
    )
    check_replicas(model)
    train(FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")), rank)
    train(fully_shard(make_model(), mesh=dist.init_device_mesh("cpu", (size,))), rank)


def mesh_of_two_dimensions(rank: int, size: int = 4) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, whole = dist.init_device_mesh("cpu", (2, 2)), torch.arange(16.0).view(4, 4)
    late(rank == 3)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    late(rank == 0)
    assert tensor.redistribute(mesh, [Replicate(), Replicate()]).to_local().equal(whole)
    assert tensor.sum().full_tensor() == whole.sum()
    check_sum(mesh.get_group(0))


def add_rank_late(value: int) -> int:
    late()
    return value + dist.get_rank()


def remote_calls(rank: int, size: int = 3) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{share('rpc')}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        assert [rpc.rpc_async(f"worker{to}", add_rank_late, (7,)).wait() for to in (1, 2)] == [8, 9]
        receive(7, 2)
    elif rank == 1:
        rpc.rpc_sync("worker2", send, (7, 0, LATE))
    rpc.shutdown()
    check_sum()


def remote_calls_of_the_board(rank: int, size: int = 3) -> None:
    from playground.lessons.rpc.lesson import Agent

    agent: Any = Agent(rank, size)
    if rank == 0:
        assert [agent.call(to, add_rank_late, 7) for to in (1, 2)] == [8, 9]
    agent.shut_down()


Program = tuple[Callable[..., None], int, tuple[str, ...]]
"""A function, the size of its world, and arguments after the rank and the size."""
PROGRAMS: dict[str, Program] = {
    name: (fn, fn.__defaults__[0], ())
    for name, fn in list(globals().items())
    if inspect.isfunction(fn)
    and fn.__defaults__
    and fn.__code__.co_varnames[:2] == ("rank", "size")
}
for meanwhile in ("main_in_a_collective", "main_asleep", "main_returned"):
    PROGRAMS |= {
        f"{start}_sends_{meanwhile}": (sends_late, 3, (start, meanwhile)) for start in START
    }
PROGRAMS |= {
    f"hook_{name}": (train_with_a_hook, 2, (name,)) for name in ("chain", "fp16", "power_sgd")
}
