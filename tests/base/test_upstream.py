"""Each private of Python's and torch's that `upstream` uses: an upgrade that breaks one fails the
test of its name."""

from __future__ import annotations

import _thread
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from playground.base import upstream
from playground.tap import METHODS
from playground.testing import World

Worlds = Callable[..., World]


def test_each_tells_the_version_whose_source_it_was_read_from() -> None:
    functions = [
        function for _, function in inspect.getmembers(upstream, inspect.isfunction)
        if function.__module__ == upstream.__name__
    ]  # fmt: skip
    assert len(functions) > 20
    for function in functions:
        about = " ".join((function.__doc__ or "").split())
        assert any(f"({what} " in about.partition("Source: ")[2] for what in ("Python", "torch")), (
            function.__name__
        )


def test_python_command() -> None:
    command = upstream.python_command("import sys; print(sys.flags.isolated, sys.version)")
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told == f"{sys.flags.isolated} {sys.version}\n"


def test_find_modules_as_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = os.getcwd()
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    monkeypatch.chdir(tmp_path)
    assert upstream.find_modules_as_here() == [start, "/somewhere"]


def run_in_fork(run: Callable[[], None]) -> int:
    """The exit code of a fork of this process that has run this: 1 if it raised."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        run()
        code = 0
    finally:
        os._exit(code)


def test_what_is_pickled_is_run_with_its_descriptors() -> None:
    """pickle_main and run_pickled, by multiprocessing's own way to send a connection."""
    ours, theirs = multiprocessing.Pipe()
    fds: list[int] = []
    content = upstream.pickle_main(theirs.send, ("heard",), fds)
    assert fds == [theirs.fileno()]
    assert not upstream.is_importing_program()
    work, to_work = os.pipe()
    with open(to_work, "wb") as pipe:
        pipe.write(content)

    def run() -> None:
        upstream.forget_parent()
        upstream.run_pickled(work, [os.dup(fd) for fd in fds])

    assert run_in_fork(run) == 0
    assert ours.recv() == "heard"
    os.close(work)


def test_is_importing_program() -> None:
    assert not upstream.is_importing_program()
    current = multiprocessing.process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]
    try:
        assert upstream.is_importing_program()
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    assert "current_process()._inheriting = True" in inspect.getsource(multiprocessing.spawn._main)


def test_renew_main_thread() -> None:
    def run() -> None:
        upstream.renew_main_thread()
        assert threading.main_thread().native_id == threading.get_native_id() == os.getpid()

    assert run_in_fork(run) == 0


def test_an_orderly_exit() -> None:
    """join_threads and run_exit_functions."""
    code = """
import atexit, os, threading, time
from playground.base import upstream
atexit.register(print, "at exit", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
upstream.join_threads()
upstream.run_exit_functions()
os._exit(0)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert told.split("\n") == ["thread", "at exit", ""]


def test_detach_finalizers() -> None:
    """Those of torch.library alone."""

    def run() -> None:
        library = torch.library.Library("playground_upstream", "FRAGMENT")
        thing = set[int]()
        other = weakref.finalize(library, thing.clear)
        of_torch = weakref.finalize(library, torch.library.define)
        assert other.alive
        assert of_torch.alive
        upstream.detach_finalizers()
        assert other.alive
        assert not of_torch.alive

    assert run_in_fork(run) == 0


def test_is_foreign() -> None:
    found = list[bool]()
    ended = threading.Event()

    def run() -> None:
        found.append(upstream.is_foreign(threading.current_thread()))
        ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(10)
    assert found == [True]
    assert not upstream.is_foreign(threading.main_thread())


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_is_read_of_a_group(group: dist.ProcessGroup) -> None:
    cpu = torch.device("cpu")
    assert type(upstream.carrier_of(group, cpu)).__name__ == "ProcessGroupGloo"
    assert cpu in upstream.devices_of(group)
    assert upstream.timeout_of(group, cpu) == timedelta(seconds=20)
    assert upstream.read_timeout(group) == timedelta(seconds=20)
    assert upstream.is_registered(group)
    assert upstream.list_groups() == [group]
    assert not upstream.is_registered(object())
    assert isinstance(upstream.default_store(), dist.Store)
    before = upstream.count_collectives(group)
    dist.all_reduce(torch.ones(1))
    assert before is not None
    assert upstream.count_collectives(group) == before + 1
    assert not upstream.is_carried_by_nccl(group)


def test_what_does_not_tell() -> None:
    assert upstream.read_timeout(object()) is None
    assert upstream.count_collectives(object()) is None
    assert not upstream.is_carried_by_nccl(object())


def test_takes_remote_calls() -> None:
    from torch.distributed.rpc import api

    assert upstream.takes_remote_calls() is False
    assert isinstance(api._is_current_rpc_agent_set(), bool)


def test_find_caller(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the functions of torch.distributed themselves, in the place of an operation of theirs."""
    found = list[tuple[bool, bool]]()
    real = dist.ProcessGroup.allreduce

    def allreduce(*args: object) -> object:
        found.append(upstream.find_caller(is_message=False))
        return real(*args)

    monkeypatch.setattr(dist.ProcessGroup, "allreduce", allreduce)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    group.allreduce([torch.ones(1)]).wait()
    assert found == [(True, False), (False, False), (False, False)]


def test_below_autograd() -> None:
    weight = torch.ones(2, requires_grad=True)
    version = weight._version
    with upstream.below_autograd():
        assert not (weight * 2).requires_grad
        weight += 1
    assert weight._version == version
    assert (weight * 2).requires_grad


REPLACED = [
    *((dist.ProcessGroup, method) for method in METHODS if method.startswith("_")),
    (dist.ProcessGroup, "_start_coalescing"),
    (dist.ProcessGroup, "_end_coalescing"),
    (DistributedDataParallel, "_sync_buffers"),
    (dist.Reducer, "_rebuild_buckets"),
    (dist.distributed_c10d, "_new_group_with_tag"),
    (dist.distributed_c10d, "_register_process_group"),
]
"""What the tap and the flight recorder replace."""


@pytest.mark.parametrize(
    ("owner", "name"), REPLACED, ids=lambda each: getattr(each, "__name__", each)
)
def test_what_is_replaced_is_there(owner: object, name: str) -> None:
    assert callable(getattr(owner, name))


def test_timeouts_of_groups_that_are_formed_without_one() -> None:
    first, nccl = (getattr(dist.distributed_c10d, name) for name in upstream.DEFAULT_TIMEOUTS)
    assert isinstance(first, timedelta)
    assert nccl is None or isinstance(nccl, timedelta)  # None in a build without nccl


def test_what_the_flight_recorder_asks_a_model(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert model._join_config.enable is False
    assert isinstance(model.reducer, dist.Reducer)
    assert upstream.may_rebuild_buckets(model)
    for _ in range(2):  # before the second forward
        model(torch.ones(1, 2)).sum().backward()
    assert not upstream.may_rebuild_buckets(model)


def test_find_tensors() -> None:
    one, other = torch.ones(1), torch.ones(2)
    found = upstream.find_tensors({"a": [one], "b": (other, 3)})
    assert [{*map(id, found)}, len(found)] == [{id(one), id(other)}, 2]


def send_to_anyone(rank: int, size: int) -> int:
    """The sender that the last rank finds, which receives; on the others, their own number."""
    if rank < size - 1:
        if rank == 1:
            dist.send(torch.ones(1), size - 1)
        return rank
    work = dist.group.WORLD.recv_anysource([torch.zeros(1)], 0)
    work.wait()
    return upstream.sender_of(work)


def test_sender_of(world: Worlds) -> None:
    assert world(3).run(send_to_anyone) == [0, 1, 1]


def test_version_of_and_memory_of() -> None:
    tensor = torch.ones(4)
    before = upstream.version_of(tensor)
    tensor[1:].add_(1)
    assert upstream.version_of(tensor) == before + 1
    assert upstream.memory_of(tensor) == upstream.memory_of(tensor[1:])
    assert upstream.memory_of(tensor) != upstream.memory_of(tensor.clone())


def test_parts_of_sparse() -> None:
    indices, values = upstream.parts_of_sparse(
        torch.sparse_coo_tensor(
            torch.tensor([[2, 2]]), torch.ones(2, 3), (4, 3), check_invariants=True
        )
    )
    assert [indices.tolist(), values.shape] == [[[2, 2]], (2, 3)]


def test_print_options() -> None:
    before = upstream.print_options()
    torch.set_printoptions(precision=before["precision"] + 1)
    try:
        assert upstream.print_options() != before
    finally:
        torch.set_printoptions(precision=before["precision"])
    assert upstream.print_options() == before


def test_local_of(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    local = torch.ones(2)
    shard = upstream.local_of(DTensor.from_local(local, init_device_mesh("cpu", (1,))))
    assert upstream.memory_of(shard) == upstream.memory_of(local)
    assert upstream.local_of(local) is None


def test_is_in_backward() -> None:
    found = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: found.append(upstream.is_in_backward()))
    (weight * 2).backward()
    assert found == [True]
    assert not upstream.is_in_backward()


def test_hooks_of_and_is_joining(world: Worlds) -> None:
    assert world(2).run(look_at_model) == [([], False, ["own"], True)] * 2


def own(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
    return default_hooks.allreduce_hook(state, bucket)


def look_at_model(rank: int, size: int) -> tuple[list[str], bool, list[str], bool]:
    ours = DistributedDataParallel(torch.nn.Linear(2, 2))
    torchs = DistributedDataParallel(torch.nn.Linear(2, 2))
    ours.register_comm_hook(None, own)
    torchs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    before = upstream.hooks_of(torchs), upstream.is_joining(ours)
    with ours.join():
        return *before, upstream.hooks_of(ours), upstream.is_joining(ours)


def test_without_modes() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        torch.ones(2).sum()
        seen = mode.count
        with upstream.without_modes():
            torch.ones(2).sum()
        assert mode.count == seen > 0


def test_batch_iterator_and_sampler_of() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    sampler = torch.utils.data.SequentialSampler(data)
    for loader in (
        torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler),
        torch.utils.data.DataLoader(data, batch_size=None, sampler=sampler),
    ):
        iterator = iter(loader)
        assert isinstance(iterator, upstream.batch_iterator())
        assert upstream.sampler_of(iterator) is sampler


def test_is_carried_by_gloo(world: Worlds) -> None:
    assert world(2).run(ask_who_carries) == [True, True]


def ask_who_carries(rank: int, size: int) -> bool:
    return upstream.is_carried_by_gloo(dist.group.WORLD, torch.device("cpu"))


def test_has_step_hooks() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    assert not upstream.has_step_hooks(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert upstream.has_step_hooks(optimizer)


def find_streams(rank: int, size: int) -> None:
    assert upstream.is_carried_by_nccl(dist.group.WORLD)
    device = torch.cuda.current_device()
    assert upstream.current_stream() == upstream.current_stream(device) == (device, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert upstream.current_stream() == (device, stream.cuda_stream)


@pytest.mark.gpu
def test_nccl_and_its_streams(nccl: World) -> None:
    nccl.run(find_streams)


@pytest.mark.gpu
def test_when_cuda_starts() -> None:
    started = []
    torch.cuda.init()
    upstream.when_cuda_starts(lambda: started.append(torch.cuda.is_initialized()))
    assert started == [True]
