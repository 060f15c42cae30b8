"""Each row of lessons/tutorials.md, tried: the old call gives what the page says, and what it says
to write works."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
import torch.nn.functional as F
from fixtures import Worlds
from processes import ENOUGH, free_port
from ranks import observed
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from playground.algorithms import load_all_reduce
from playground.algorithms.executor import Addressed
from playground.base.remote import ROOT
from playground.lessons.data_parallel.lesson import data_parallel, replicate
from playground.lessons.devices import device_of, place, track_memory
from playground.lessons.sgd.lesson import average_gradients
from playground.training.partition import DataPartitioner, share

PAGE = ROOT / "playground" / "lessons" / "tutorials.md"

Try = Callable[..., object]
TRIES: dict[str, Try] = {}
"""The functions that try a row, by its first cell."""


def tries(cell: str) -> Callable[[Try], Try]:
    """This function tries the row that begins with `cell`. It returns, raises or warns what the row
    says in code."""

    def add(function: Try) -> Try:
        assert cell not in TRIES
        TRIES[cell] = function
        return function

    return add


def rows() -> dict[str, list[str]]:
    """The rows of all tables below the first heading of a part, by their first cell."""
    found: dict[str, list[str]] = {}
    _, _, parts = PAGE.read_text(encoding="utf-8").partition("\n## ")
    for line in parts.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| the tutorials")):
            first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
            assert first not in found
            found[first] = others
    return found


def test_every_row_is_tried() -> None:
    assert TRIES.keys() == rows().keys()
    assert all(len(others) == 3 for others in rows().values())


@pytest.mark.torch(2, 15)  # the page says what it does
@pytest.mark.parametrize("cell", rows())
def test_a_row_holds(cell: str, request: pytest.FixtureRequest) -> None:
    """Its function returns, raises or warns a text that the row quotes, in whole words."""
    today, _, chapter = rows()[cell]
    said = outcome(TRIES[cell], request)
    quoted = "|".join(re.escape(text) for text in re.findall(r"`([^`]+)`", today))
    assert re.search(rf"(?<!\w)({quoted})(?!\w)", said), said
    [folder] = re.findall(r"\]\((\w+)\)", chapter)
    assert (PAGE.parent / folder / "README.md").is_file()


def outcome(function: Try, request: pytest.FixtureRequest) -> str:
    """All that came of it, in one line. Its parameters are fixtures."""
    names = [name for name in function.__annotations__ if name != "return"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = str(function(*map(request.getfixturevalue, names)))
        except (Exception, SystemExit) as error:
            said = str(error)
    return " ".join(" ".join([said, *(str(warning.message) for warning in caught)]).split())


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank, this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def warned_on(fn: Callable[[], object]) -> str:
    """The warnings of this call, or the text of its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fn()
        except (ValueError, RuntimeError) as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


def in_a_world(function: Try) -> Try:
    """The same, in a world of one rank."""

    def tried(alone: None) -> object:
        return function()

    return tried


TRIES |= {
    "`dist.init_process_group('tcp', init_method='tcp://10.1.1.20:23456')`": lambda: (
        dist.init_process_group("tcp", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    ),
    "`dist.init_process_group('mpi')`, started by `mpirun`": lambda: dist.init_process_group(
        "mpi", store=dist.HashStore(), rank=0, world_size=1
    ),
    "`if dist.get_rank() == 0: download()` before `init_process_group`": lambda: dist.get_rank(),
    "a function of a notebook's cell, given to `Process` or `mp.spawn`": lambda: (
        subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True).stderr
    ),
    "`init_process_group(…, device_id=…)`, on CPUs too": lambda: dist.init_process_group(
        "gloo", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cpu")
    ),
    "`python -m torchelastic.distributed.launch`": lambda: importlib.import_module(
        "torchelastic.distributed.launch"
    ),
    "`dist.all_reduce_multigpu([tensor])`": lambda: dist.all_reduce_multigpu([torch.ones(1)]),
    "`for p in processes: p.join()`, and no more": lambda: dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{free_port()}",
        rank=0,
        world_size=2,
        timeout=timedelta(seconds=0.9),  # of which the store makes a whole second
    ),
    "`dist.send(tensor, dist, …)` in a published list of calls": in_a_world(
        lambda: dist.send(torch.ones(1), dist)
    ),
    '"`DistributedSampler` cuts the data and sends it to the processes."': lambda: list(
        DistributedSampler(range(6), num_replicas=2, rank=0, shuffle=False)
    ),
    "`Variable(data)`": lambda: type(torch.autograd.Variable(torch.ones(1))).__name__,
    "`Variable(data, volatile=True)`": lambda: torch.autograd.Variable(
        torch.ones(1), volatile=True
    ),
    "`F.log_softmax(x)`": lambda: F.log_softmax(torch.ones(2, 3)),
    "`from pytorch_pretrained_bert import BertForSequenceClassification`": lambda: (
        importlib.import_module("pytorch_pretrained_bert")
    ),
    "`DistributedDataParallelCPU(model)`": in_a_world(
        lambda: nn.parallel.DistributedDataParallelCPU(nn.Linear(1, 1))
    ),
    "`DistributedDataParallel(model, device_ids=[rank])` on CPUs": in_a_world(
        lambda: DistributedDataParallel(nn.Linear(1, 1), device_ids=[0])
    ),
    "`init_method='tcp://127.0.0.1:FREEPORT'`": lambda: dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:FREEPORT", rank=0, world_size=1
    ),
    "`torch.cuda.set_device(rank)`, with the global rank": lambda: torch.cuda.set_device(
        torch.cuda.device_count() + 5
    ),
    "`dist.ReduceOp.Min`": lambda: dist.ReduceOp.Min,
    "a criterion that returns `(loss, targets)`, then `loss.backward()`": lambda: (
        torch.ones(1),
        1,
    ).backward(),  # type: ignore[attr-defined]
    "`DistributedDataParallel(model, device_id=[rank])`": in_a_world(
        lambda: DistributedDataParallel(nn.Linear(1, 1), device_id=[0])
    ),
}
"""Old calls of one line."""


@tries("`loss = criterion(outputs, targets)`, where the forward's result was named `predictions`")
def a_name_is_missing() -> None:
    exec("predictions = 1\nloss = max(outputs, 0)", {})


@tries("`os.environ['MASTER_PORT'] = '29500'`")
def port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dist.TCPStore("127.0.0.1", server.getsockname()[1], 1, is_master=True)


SCRIPT = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
# at once: two ranks write to one pipe
sys.stdout.write(f"LOCAL_RANK {os.environ['LOCAL_RANK']}\\n")
sys.stdout.flush()
parser.parse_args()
"""


@pytest.fixture
def launched(fork_program: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """`launched(module, *words)`: the output of one of torch's launchers and of an old script."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(module: str, *words: str) -> str:
        out, err = fork_program(module, *words, script).communicate(ENOUGH)
        return f"{out} {err}"

    return run


@tries("`python -m torch.distributed.launch --nproc_per_node=2 train.py`")
def launch_is_deprecated(launched: Callable[..., str]) -> str:
    assert "LOCAL_RANK 0" in launched(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    )
    return launched(
        "torch.distributed.launch",
        "--nproc_per_node=1",
        "--use-env",
        f"--master-port={free_port()}",
    )


@tries("`parser.add_argument('--local_rank', type=int)`")
def local_rank_is_spelt_differently(launched: Callable[..., str]) -> str:
    said = launched(
        "torch.distributed.launch", "--nproc_per_node=1", f"--master-port={free_port()}"
    )
    assert "LOCAL_RANK 0" in said
    return said


@tries(
    "`OMP_NUM_THREADS`, in a warning of the launcher: "
    "`Setting OMP_NUM_THREADS environment variable for each process to be 1`"
)
def torchrun_takes_one_core_each(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args = torch.distributed.run.parse_args(["--standalone", "--nproc-per-node", "2", "train.py"])
    torch.distributed.run.config_from_args(args)
    return os.environ.pop("OMP_NUM_THREADS")


@tries("`CUDA_VISIBLE_DEVISES=0,1` in a published listing")
def nothing_reads_a_misspelt_name(monkeypatch: pytest.MonkeyPatch) -> str:
    seen = torch.cuda.device_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVISES", "")
    assert torch.cuda.device_count() == seen
    return "every"


NOTEBOOK = """
def run():
    pass

import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=run)
process.start()
process.join()
"""


@tries("`CUDA_VISIBLE_DEVICES=0,1 python train.py`")
def no_gpu_is_left(fork_program: Callable[..., Any]) -> str:
    _, err = fork_program(
        "playground", "hello", "--backend", "nccl", CUDA_VISIBLE_DEVICES=""
    ).communicate(ENOUGH)
    return str(err)


@tries("`print('Rank', rank, 'has data', tensor[0])`")
def a_tensor_is_printed() -> str:
    tensor = torch.ones(1)
    assert tensor.item() == 1.0
    return " ".join(["has data", str(tensor[0])])  # as print shows it: an f-string shows a number


def send_to_one(rank: int, size: int, receivers: tuple[int, ...]) -> float:
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank in receivers:
        dist.recv(tensor, src=0)
    return tensor.item()


@tries("the point-to-point sample on three ranks or more")
def the_others_wait(world: Worlds) -> str:
    assert world(3).run(send_to_one, (1,)) == [1.0, 1.0, 0.0]
    with pytest.raises(pytest.fail.Exception) as failure:
        world(3, timeout=2).run(send_to_one, (1, 2))
    return str(failure.value)


@tries("`dist.all_reduce(tensor, op=dist.reduce_op.SUM)`")
def reduce_op_is_deprecated(alone: None) -> None:
    assert dist.reduce_op.SUM == dist.ReduceOp.SUM


@tries("`dist.all_reduce(tensor, dist.ReduceOp.SUM, group=0)`")
def a_group_is_no_number(alone: None) -> None:
    dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, dist.new_group([0]))
    dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, group=0)


@tries("`dist.gather_send(tensor, dst)`, `dist.gather_recv(tensors)`")
def gather_send_is_gone() -> None:
    assert not hasattr(dist, "gather_recv")
    dist.gather_send(torch.ones(1), 0)


def gather_with_list(rank: int, size: int) -> str:
    tensors = [torch.zeros(1) for _ in range(size)]
    said = warned_on(lambda: dist.gather(torch.ones(1), tensors, dst=0)) if rank else ""
    dist.gather(torch.full((1,), rank + 1.0), tensors if rank == 0 else None, dst=0)
    assert rank or torch.cat(tensors).tolist() == [1.0, 2.0]
    return said


@tries("`dist.gather(tensor, gather_list=tensors, dst=0)` on every rank")
def the_list_is_the_destination_s(world: Worlds) -> list[str]:
    return world(2).run(gather_with_list)


def first_ring(rank: int, size: int) -> float:
    """As it was first published: the buffer that is sent begins as zeros."""
    tensor = torch.full((1,), rank + 1.0)
    sent, received, total = torch.zeros(1), torch.zeros(1), tensor.clone()
    for step in range(size - 1):
        outgoing, incoming = (sent, received) if step % 2 == 0 else (received, sent)
        request = dist.isend(outgoing, (rank + 1) % size)
        dist.recv(incoming, (rank - 1) % size)
        total += incoming
        request.wait()
    load_all_reduce("tutorial-ring")(tensor)
    assert tensor.item() == size * (size + 1) / 2
    return total.item()


@tries("`allreduce(send, recv)`, the ring of the first versions")
def the_first_ring_sends_nothing(world: Worlds) -> list[float]:
    return world(3).run(first_ring)


@tries("`DataLoader(partition, batch_size=128 / float(size))`")
def a_batch_is_a_whole_number() -> None:
    assert DataLoader(range(1024), batch_size=128 // 2).batch_size == 64
    DataLoader(range(1024), batch_size=128 / float(2))


@tries("`part_len = int(frac * data_len)`")
def rounding_down_loses_samples() -> int:
    partitioner = DataPartitioner(range(60_000), [1 / 7] * 7)
    assert sum(len(partitioner.use(rank)) for rank in range(7)) == 60_000
    return 7 * int(1 / 7 * 60_000)


@tries("`DistributedSampler(dataset)` in a loop over epochs")
def the_order_stays() -> bool:
    sampler = DistributedSampler(range(100), num_replicas=2, rank=0)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    return first == second


@tries("`if type(param) is torch.Tensor: dist.all_reduce(param.grad)`")
def a_parameter_is_no_bare_tensor(alone: None) -> str:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    average_gradients(model)
    assert not any(
        type(param) is torch.Tensor or type(param.data) is torch.FloatTensor
        for param in model.parameters()
    )
    return " ".join(type(param).__name__ for param in model.parameters())


@tries("`F.nll_loss(output, target, size_average=False)`")
def size_average_is_reduction() -> None:
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    old = F.nll_loss(output, target, size_average=False)
    assert old == F.nll_loss(output, target, reduction="sum")


@tries("`epoch_loss += loss.data[0]`")
def a_loss_has_no_elements() -> None:
    assert torch.tensor(2.0).item() == 2.0
    torch.tensor(2.0).data[0]


@tries("`data.cuda(async=True)`")
def async_is_a_keyword() -> None:
    assert torch.ones(1).to("cpu", non_blocking=True) == 1
    ast.parse("data.cuda(async=True)")


@tries("`nn.DataParallel(model)` on a machine without GPUs")
def data_parallel_without_gpus(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        sys.modules[nn.DataParallel.__module__], "_get_available_device_type", lambda: None
    )
    model = nn.Linear(1, 1)
    parallel = nn.DataParallel(model)
    assert parallel.module is model
    assert data_parallel(model, [torch.ones(2, 1)], DEVICES, DEVICES[0]).shape == (2, 1)
    return str(parallel.device_ids)


@tries("`DataParallel(model, device_ids=[0, 1], output_device=1)`")
def outputs_are_gathered_elsewhere() -> str:
    with track_memory(DEVICES):
        model = place(nn.Linear(1, 1), DEVICES[0])
        outputs = data_parallel(model, [torch.ones(2, 1)], DEVICES, DEVICES[1])
        outputs.sum().backward()
        assert device_of(model.weight.grad) == DEVICES[0]
        return str(device_of(outputs))


@tries("a forward that returns one loss per device, then `loss.backward()`")
def losses_are_a_vector() -> None:
    losses = torch.ones(4, requires_grad=True) * 2
    losses.mean().backward(retain_graph=True)
    losses.backward()


@tries("`from parallel import DataParallelModel, DataParallelCriterion`")
def parallel_is_ours() -> None:
    lesson = importlib.import_module("playground.lessons.data_parallel.lesson")
    assert lesson.apply_replicas
    assert lesson.keep_outputs
    importlib.import_module("parallel")


@tries("`DistributedDataParallel(model, bucket_size_mb=25)`")
def buckets_have_a_cap(alone: None) -> None:
    DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=25)
    DistributedDataParallel(nn.Linear(1, 1), bucket_size_mb=25)


@tries("the Reducer, without saying where it is")
def the_reducer(alone: None) -> str:
    reducer = type(DistributedDataParallel(nn.Linear(1, 1)).reducer)
    return f"{reducer.__module__}.{reducer.__qualname__}"


@tries("`ddp.fc1` for a layer of the model")
def layers_are_in_module(alone: None) -> None:
    model = nn.Module()
    model.fc1 = nn.Linear(1, 1)
    ddp = DistributedDataParallel(model)
    assert ddp.module.fc1 is model.fc1
    _ = ddp.fc1


@tries("`model.load_state_dict(ddp.state_dict())`")
def names_begin_with_module(alone: None) -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    nn.Linear(1, 1).load_state_dict(ddp.module.state_dict())
    nn.Linear(1, 1).load_state_dict(ddp.state_dict())


class HalfUsed(nn.Module):
    """Its loss does not reach the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def two_steps(find_unused: bool) -> None:
    ddp = DistributedDataParallel(HalfUsed(), find_unused_parameters=find_unused)
    for _ in range(2):
        ddp(torch.ones(1, 1)).sum().backward()


@tries("`torch.cuda.amp.GradScaler()`")
def amp_is_not_cuda_s_alone() -> None:
    assert torch.amp.GradScaler("cuda", enabled=False).state_dict() == {}
    torch.cuda.amp.GradScaler(enabled=False)


@tries("a model some of whose parameters the loss does not reach")
def unused_parameters(alone: None) -> None:
    two_steps(True)
    two_steps(False)


@tries("`rpc.init_rpc(…, backend=rpc.BackendType.PROCESS_GROUP)`")
def tensorpipe_is_left() -> None:
    assert rpc.BackendType.TENSORPIPE
    _ = rpc.BackendType.PROCESS_GROUP


@tries("`from torch.distributed.pipeline.sync import Pipe`")
def pipelining_is_new() -> None:
    assert importlib.util.find_spec("torch.distributed.pipelining")
    importlib.import_module("torch.distributed.pipeline.sync")


def wait_for_send(rank: int, size: int) -> float:
    """When rank 0's send was over, and when rank 1 began to receive: moments on one clock."""
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1), dst=1)
        return time.monotonic()
    time.sleep(0.5)
    began = time.monotonic()
    dist.recv(torch.ones(1), src=0)
    return began


@tries('"`send` returns as soon as the data is copied, so both ranks may send first."')
def a_send_waits_for_its_receive(world: Worlds) -> str:
    done, began = world(2).run(wait_for_send)
    return "before" if done < began else "after"


def reduced(rank: int, size: int) -> float:
    tensor = torch.full((1,), rank + 1.0)
    dist.reduce(tensor, dst=0)
    return tensor.item()


@tries('"`reduce` leaves the tensors of the other ranks as they were."')
def reduce_writes_everywhere(world: Worlds) -> list[float]:
    return world(3).run(reduced)


def outside(rank: int, size: int) -> str:
    group, tensor = dist.new_group([0, 1]), torch.full((1,), rank + 1.0)
    said = warned_on(lambda: dist.all_reduce(tensor, group=group))
    assert tensor.item() == 3.0
    return said


@tries('"A rank outside a group must not take part", as if it were stopped')
def a_rank_outside_is_warned(world: Worlds) -> str:
    return world(3).run(outside)[2]


def leave_rank_0_waiting(rank: int, size: int, wait_all: bool) -> str:
    limit, store = timedelta(seconds=0.3), dist.distributed_c10d._get_default_store()
    said = (
        warned_on(lambda: dist.monitored_barrier(timeout=limit, wait_all_ranks=wait_all))
        if rank == 0
        else ""
    )
    if rank == 0:
        store.set(f"waited, {wait_all}", "yes")
    store.wait([f"waited, {wait_all}"])
    return said


@tries('"`monitored_barrier` tells which ranks did not come."')
def the_first_is_named(world: Worlds) -> str:
    assert "Ranks 1, 2 failed" in world(3).run(leave_rank_0_waiting, True)[0]
    first = world(3).run(leave_rank_0_waiting, False)[0]
    assert "2 failed" not in first
    return first


def average(rank: int, size: int) -> float:
    tensor = torch.full((1,), rank + 1.0)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tensor.item()


@tries('"`ReduceOp.AVG` is for nccl alone."')
def gloo_averages(world: Worlds) -> list[float]:
    return world(2).run(average)


@tries('"Each rank takes 128 / size samples, so the global batch stays 128."')
def three_ranks_take_126() -> int:
    assert [share(128, rank, 3) for rank in range(3)] == [43, 43, 42]
    return 3 * (128 // 3)


def seeded(rank: int, size: int, seed: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(1234)
    weights = nn.Linear(3, 3).weight.flatten().tolist()
    torch.manual_seed(seed + rank if seed else 1234)
    return weights, F.dropout(torch.ones(64)).tolist()


@tries('"The same seed on every rank is all it takes."')
def masks_are_equal_too(world: Worlds) -> bool:
    (weights, mask), (weights_1, mask_1) = world(2).run(seeded, 1)
    assert weights == weights_1
    assert mask != mask_1
    first, second = world(2).run(seeded, 0)
    return first == second


def mean_losses(rank: int, size: int) -> tuple[float, float]:
    """The means of its own part, and of the batch."""
    losses = torch.tensor([1.0] if rank == 0 else [2.0, 4.0])
    total = torch.tensor([losses.sum(), torch.tensor(float(len(losses)))])
    dist.all_reduce(total)
    return losses.mean().item(), (total[0] / total[1]).item()


@tries('"Each rank prints the training loss."')
def a_loss_is_of_a_part(world: Worlds) -> list[float]:
    parts, whole = zip(*world(2).run(mean_losses), strict=True)
    assert whole == pytest.approx([7 / 3] * 2)
    return list(parts)


@tries('"`DistributedSampler` gives each sample to exactly one rank."')
def samples_are_padded() -> int:
    taken = [list(DistributedSampler(range(10), num_replicas=3, rank=rank)) for rank in range(3)]
    assert {sample for part in taken for sample in part} == {*range(10)}
    return sum(map(len, taken))


DEVICES = [torch.device("cpu:0"), torch.device("cpu:1")]


@tries('"DataParallel replicates the model, then scatters the batch"')
def the_batch_is_scattered_first() -> str:
    source = inspect.getsource(nn.DataParallel.forward)
    parts = ["replicate", "scatter", "gather", "parallel_apply"]
    assert all(f"self.{part}(" in source for part in parts)
    return ", ".join(sorted(parts, key=lambda part: source.rindex(f"self.{part}(")))


@tries('"DataParallel keeps one replica per device."')
def replicas_are_new() -> str:
    model = nn.Linear(1, 1)
    first, second = replicate(model, DEVICES), replicate(model, DEVICES)
    assert not {*map(id, first)} & {*map(id, second)} - {id(model)}
    return "new"


@tries('"DataParallel\'s replicas drift apart."')
def replicas_are_equal() -> float:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_parallel(model, [torch.randn(4, 3)], DEVICES, DEVICES[0]).sum().backward()
    optimizer.step()
    one, other = (replica.weight for replica in replicate(model, DEVICES))
    return (one - other).abs().max().item()


def changed(rank: int, size: int) -> tuple[float, float]:
    """A weight as DDP constructs it, and after each rank changed it and took part in a step."""
    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    ddp = DistributedDataParallel(model)
    constructed = model.weight.item()
    with torch.no_grad():
        model.weight.fill_(float(rank))
    ddp(torch.ones(1, 1)).sum().backward()
    return constructed, model.weight.item()


@tries('"DDP keeps the models equal by sending the parameters."')
def parameters_are_sent_once(world: Worlds) -> list[float]:
    constructed, after = zip(*world(2).run(changed), strict=True)
    assert len({*constructed}) == 1
    return list(after)


RPC_ALONE = """
import torch.distributed as dist
from torch.distributed import rpc
rpc.init_rpc("worker", rank=0, world_size=1)
print(rpc.rpc_sync("worker", dist.is_initialized))
rpc.shutdown()
"""


@tries(
    '"DDP and RPC are both built on c10d: DDP on its collectives, RPC on its point-to-point '
    'messages."'
)
def rpc_needs_no_process_group(run_script: Callable[..., Any]) -> str:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return str(run_script(RPC_ALONE, **address).out)


@tries('"All-reduce overlapped with backward is always faster."')
def one_rank_sends_its_buckets(alone: None) -> str:
    ddp, sent = DistributedDataParallel(nn.Linear(1, 1)), []

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, lambda state, bucket: count(state, bucket))
    ddp(torch.ones(1, 1)).sum().backward()
    return f"{len(sent)}"


def tensors_sent(rank: int, size: int, algorithm: str) -> float:
    """How many times the tensor this rank sends."""
    tensor, sent = torch.ones(4 * size), 0

    def count(send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        nonlocal sent
        sent += sum(chunk.numel() for chunk, _ in send)

    with observed(count):
        load_all_reduce(algorithm)(tensor)
    return sent / tensor.numel()


@tries('"The all-reduce of the tutorial is a ring, so it is optimal."')
def whole_tensors_go_round(world: Worlds) -> str:
    assert world(4).run(tensors_sent, "ring") == [1.5] * 4
    [each] = {*world(4).run(tensors_sent, "tutorial-ring")}
    return f"{each:g}"


@tries('"Baidu developed the ring all-reduce in 2017."')
def the_ring_is_older() -> str:
    chapter = (PAGE.parent / "all_reduce" / "README.md").read_text(encoding="utf-8")
    [year] = re.findall(r"^- Patarasuk and Yuan, (\d{4}), ", chapter, re.MULTILINE)
    return year
