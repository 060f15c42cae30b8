"""The rules of the simulated GPU, which are a real one's: `python -m
playground.world.simulated_gpu 2 python -m pytest -m gpu`."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_gpu import ROWS, Machine, carry_out
from torch import nn

from playground import Deadlock
from playground.testing import World
from playground.world import RankFailed, device
from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]
ENOUGH = 60.0
QUICK = (
    "hello",
    "p2p",
    "collectives",
    "allreduce",
    "pipeline",
    "ddp",
    "zero",
    "tensor",
    "context",
    "experts",
    "mesh",
)


@pytest.fixture
def pair(world: Callable[..., World]) -> World:
    return world(2, backend="nccl", timeout=ENOUGH)


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def refusals(rank: int, size: int) -> list[str]:
    here = torch.ones(2, device=device())
    attempts: list[Callable[[], object]] = [
        lambda: here + torch.ones(2),
        lambda: F.linear(here, torch.ones(2, 2)),
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.recv(here),
        lambda: here.numpy(),
    ]
    said = []
    for attempt in attempts:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            attempt()
        said.append(str(caught.value).splitlines()[0])
    return said


def test_mixed_devices_are_refused_in_torch_s_words(pair: World) -> None:
    for adds, multiplies, reduces, receives, shows in pair.run(refusals):
        for said in (adds, multiplies):
            assert said.startswith(
                "Expected all tensors to be on the same device, but found at least two devices"
            )
        assert said.count("cuda:") == 1
        assert reduces.startswith("No backend type associated with device type cpu")
        assert receives.endswith(" does not support recvAnysource")
        assert shows.startswith("can't convert cuda")


def go_on(rank: int, size: int) -> float:
    """Rank 0 computes with what it will receive. Rank 1 sends when rank 0 has issued all that."""
    tensor = torch.full((3,), float(rank), device=device())
    (tensor + 1).sum().item()  # the kernels are loaded
    if rank == 1:
        store().wait(["issued"])
        dist.send(tensor, 0)
        return tensor[0].item()
    work = dist.irecv(tensor, 1)
    assert work is not None
    work.wait()
    done = torch.cuda.Event()
    result = (tensor + 1).sum()
    done.record()
    assert not done.query()
    store().set("issued", "yes")
    assert result.item() == 6.0
    assert done.query()
    return tensor[0].item()


def test_the_host_goes_on_and_only_values_wait(pair: World) -> None:
    assert pair.run(go_on) == [1.0, 1.0]


def swap(rank: int, size: int, how: str) -> float:
    """Both send, then receive: one message after the other, or as one batch."""
    dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=3))
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=3))
    mine, theirs = torch.full((2,), float(rank), device=device()), torch.zeros(2, device=device())
    if how == "batch":
        ops = [
            dist.P2POp(dist.isend, mine, 1 - rank, group),
            dist.P2POp(dist.irecv, theirs, 1 - rank, group),
        ]
        works = dist.batch_isend_irecv(ops)
    else:
        works = [dist.isend(mine, 1 - rank, group), dist.irecv(theirs, 1 - rank, group)]
    for work in works:
        work.wait()
    return theirs[0].item()


@pytest.mark.stress
def test_messages_happen_in_the_order_of_issue(pair: World) -> None:
    assert pair.run(swap, "batch") == [1.0, 0.0]
    with pytest.raises(Deadlock, match="is in send to rank"):
        pair.run(swap, "one by one")


def disagree(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=3))
    tensor = torch.zeros(2 + rank, device=device())
    dist.all_reduce(tensor, group=group)
    tensor.sum().item()


@pytest.mark.stress
def test_a_mismatch_hangs_until_the_watchdog_ends_the_rank(pair: World) -> None:
    with pytest.raises(RankFailed, match=r"watchdog|SIGABRT"):
        pair.run(disagree)


def launch_beside_a_receive(rank: int, size: int) -> list[bool]:
    """Whether a kernel, known and new, can be launched while a receive spins; rank 1 sends after
    the known one."""
    tensor = torch.ones(3, device=device())
    tensor.exp()
    dist.all_reduce(tensor)
    tensor.sum().item()
    if rank == 1:
        store().wait(["tried"])
        dist.send(tensor, 0)
        return []
    dist.irecv(torch.empty_like(tensor), 1)
    ended: list[bool] = []
    for kernel in (tensor.exp, tensor.erfinv):
        thread = threading.Thread(target=kernel, daemon=True)
        thread.start()
        thread.join(0.5 if ended else ENOUGH)
        ended.append(not thread.is_alive())
    store().set("tried", "yes")
    thread.join(ENOUGH)
    return [*ended, not thread.is_alive()]


def test_the_first_launch_of_a_kernel_waits_for_an_idle_device(pair: World) -> None:
    assert pair.run(launch_beside_a_receive) == [[True, False, True], []]


def test_a_host_that_does_not_wait_for_a_copy_reads_what_was_there_before() -> None:
    """And has sent what it writes too early."""
    there = torch.ones(1000, device="cuda")
    read = torch.zeros(1000, pin_memory=True)
    torch.cuda._sleep(300_000_000)
    read.copy_(there, non_blocking=True)
    assert read.sum().item() == 0
    torch.cuda.synchronize()
    assert read.sum().item() == 1000
    torch.cuda._sleep(300_000_000)
    there.copy_(read, non_blocking=True)
    read.fill_(5)
    assert there.sum().item() == 5000


KEEPS_THE_GIL = """
import ctypes, torch
wait = ctypes.PyDLL(None).cudaDeviceSynchronize
ones = torch.ones(3, device="cuda")
(ones * torch.tensor(2.0)).tolist()
torch.cuda._sleep(300_000_000)
tripled = ones * torch.tensor(3.0)
wait()
torch.cuda._sleep(300_000_000)
ones.copy_(torch.full((3,), 5.0).pin_memory(), non_blocking=True)
wait()
print(tripled.tolist(), ones.tolist())
"""
"""The last that holds a number of the CPU, and a pinned tensor, is the stream."""


def test_a_stream_works_while_who_waits_for_it_keeps_the_gil() -> None:
    command = [sys.executable, "-c", KEEPS_THE_GIL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[3.0, 3.0, 3.0] [5.0, 5.0, 5.0]\n"


def weight_gradients(deterministic: bool) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    inputs, weight = torch.randn(4, 2, 9, 9, device="cuda"), torch.randn(3, 2, 3, 3, device="cuda")
    with torch.backends.cudnn.flags(deterministic=deterministic):
        for _ in range(5):
            leaf = weight.clone().requires_grad_()
            F.conv2d(inputs, leaf).square().sum().backward()
            assert leaf.grad is not None
            yield leaf.grad.cpu()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_last_bits_of_a_convolution_differ_unless_told_not_to(deterministic: bool) -> None:
    first, *others = weight_gradients(deterministic)
    assert all(torch.allclose(first, other, rtol=1e-5) for other in others)
    assert all(torch.equal(first, other) for other in others) == deterministic


def test_gradients_come_in_a_thread_of_the_device() -> None:
    threads = []
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    leaf.register_hook(lambda grad: threads.append(threading.get_ident()))
    leaf.sum().backward()
    assert threads
    assert threads[0] != threading.get_ident()


DIES = (
    "import os, signal, torch; torch.ones(1, device='cuda'); os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.mark.stress
def test_a_killed_process_releases_its_gpu_after_its_files() -> None:
    ours, theirs = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", DIES], pass_fds=[theirs])
    os.close(theirs)
    ended = os.pidfd_open(process.pid)
    first, _, _ = select.select([ours, ended], [], [], ENOUGH)
    assert first == [ours]
    assert process.wait(ENOUGH) == -9
    os.close(ended)
    os.close(ours)


@pytest.mark.stress
def test_two_ranks_of_one_gpu_need_an_nccl_that_shares_it(start_cli: Callable[..., Any]) -> None:
    forbids = {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    for environ, code in (({}, 0), (forbids, 1)):
        run = start_cli("rpc", "--backend", "nccl", "-n", 2, **{GPUS: "1"}, **environ)
        _, err = run.communicate(timeout=ENOUGH)
        assert run.returncode == code, err
        assert ("Duplicate GPU detected" in err) == bool(environ)


def test_memory_is_counted_and_ends() -> None:
    torch.cuda.empty_cache()
    before, (free, total) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    tensor = torch.zeros(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    assert torch.cuda.mem_get_info()[0] < free
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    del tensor
    assert torch.cuda.memory_allocated() == before


def test_random_numbers_follow_the_state_of_each_device() -> None:
    states = [torch.cuda.get_rng_state(number) for number in range(torch.cuda.device_count())]
    drawn = [torch.randn(5, device=f"cuda:{number}") for number in range(len(states))]
    host = torch.get_rng_state()
    torch.cuda.set_rng_state_all(states)
    for number, values in enumerate(drawn):
        assert torch.equal(torch.randn(5, device=f"cuda:{number}"), values)
        assert not torch.equal(torch.randn(5, device=f"cuda:{number}"), values)
    assert torch.equal(torch.get_rng_state(), host)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("gpus", "ranks", "which"),
    [
        (
            1,
            2,
            lambda words: "{folder}" in words,
        ),  # one may read what another has written: together, and in order
        (1, 2, lambda words: "{folder}" not in words and words.split()[0] in QUICK),
        (1, 2, lambda words: "{folder}" not in words and words.split()[0] not in QUICK),
        *[(gpus, gpus, lambda words: words.split()[0] in QUICK) for gpus in (8, 4, 1)],
    ],
    ids=["2 share, files", "2 share, quick", "2 share, slow", "8", "4", "1"],
)
def test_every_row_of_make_gpu_ends_as_it_should(
    gpus: int,
    ranks: int,
    which: Callable[[str], bool],
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them on a GPU that two ranks share; elsewhere those that are quick on two cores."""
    monkeypatch.setenv(GPUS, str(gpus))
    monkeypatch.setenv("PLAYGROUND_DATA_DIR", str(data_dir))
    machine = Machine(gpus=gpus, ranks=ranks, shares=True)
    rows = [row for row in ROWS if row.needs(machine) and which(row.words)]
    with tempfile.TemporaryFile("w+") as said, contextlib.redirect_stderr(said):
        ended = [carry_out(row, machine, tmp_path) for row in rows]
        said.seek(0)
        assert [line for is_fine, line in ended if not is_fine] == [], said.read()
    assert len(ended) > 8


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    ),
    "attention": lambda: nn.Sequential(
        nn.Flatten(2),
        nn.TransformerEncoderLayer(64, 4, 32, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(192, 5),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_computes_what_the_cpu_computes(name: str) -> None:
    """Three steps of SGD in float64, batch statistics and clipping included."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    inputs = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    labels = torch.arange(6) % 5
    ended: list[list[torch.Tensor]] = []
    for where in ("cpu", "cuda"):
        replica = copy.deepcopy(model).to(where)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(replica(inputs.to(where)), labels.to(where)).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
        ended.append([value.cpu() for value in replica.state_dict().values()])
    for ours, theirs in zip(*ended, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
