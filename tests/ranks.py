"""What tests let ranks do. A module of its own, so that a rank imports nothing it does not need."""

from __future__ import annotations

import datetime
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons import LESSONS
from playground.runtime import host, report
from playground.training.data import Images, partition_dataset, partition_test_set
from playground.training.grad_syncs import RUNGS
from playground.training.loop import train
from playground.training.net import Net
from playground.training.replicas import broadcast_parameters, largest_difference
from playground.training.runner import run_training
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync, new_grad_sync


def add_up(rank: int, size: int) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


def surroundings(rank: int, size: int) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "policy": os.sched_getscheduler(0) if hasattr(os, "SCHED_BATCH") else None,
        "backend": dist.get_backend(),
        "local_rank": dist.get_node_local_rank(),
        "listening": listening_addresses(),
    }


def cores_to_train_on(rank: int, size: int) -> list[int]:
    host.keep_to_one_core()
    host.keep_to_one_core()  # a rank may train twice
    return sorted(os.sched_getaffinity(0))


def page_faults(rank: int, size: int) -> float:
    """How many there are in a step of training, once memory has grown to what it needs."""
    model, images = Net().to(memory_format=torch.channels_last), torch.rand(64, 1, 28, 28)

    def step() -> None:
        model.zero_grad()
        model(images).sum().backward()

    for _ in range(20):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20


def listening_addresses() -> list[str]:
    """Local addresses, in the kernel's hexadecimal, of this process's listening TCP sockets."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].split(":")[0])
    return found


def nothing_to_send(rank: int, size: int) -> Any:
    return lambda: None


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
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(1000)
    raise AssertionError(how)


def wait_in_vain(rank: int, size: int) -> None:
    """Rank 0 waits, with a timeout of its own, for a rank that does not come."""
    if rank == 1:
        time.sleep(1000)
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=2))
    dist.barrier(group=group)


def slow_but_alive(rank: int, size: int) -> str:
    for _ in range(6):
        time.sleep(0.4)
        report(still="here")
    return "done"


def small_model(seed: int) -> nn.Module:
    """A model with every kind of parameter that matters here, in float64, without dropout."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(1, 3, 5), nn.MaxPool2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10))
    return layers.double()


def shared_steps(rank: int, size: int, folder: Path, samples: int, batch_size: int, sync: str) -> list[list[float]]:
    """A few steps of SGD on this rank's shares; the parameters after each epoch, flat."""
    model = small_model(seed=rank)  # each rank its own: rank 0's must win
    if sync == "ddp":
        model = DistributedDataParallel(model)
    else:
        broadcast_parameters(model)
    averaging = new_grad_sync(sync, model, bucket_cap=1000) if sync in RUNGS else GradSync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    history = []
    train_set = partition_dataset(Images(folder, "train", samples), batch_size)
    for _ in range(2):
        left = samples
        for images, labels in train_set:
            batch, left = min(batch_size, left), left - batch_size
            optimizer.zero_grad()
            output = model(images.double())
            loss = nn.functional.cross_entropy(output, labels, reduction="sum")
            (loss * size / batch).backward()
            averaging.after_backward()
            optimizer.step()
        history.append(torch.cat([param.detach().flatten() for param in model.parameters()]).tolist())
    return history


def which_samples(rank: int, size: int, folder: Path, samples: int, batch_size: int) -> dict[str, Any]:
    """The positions, within the whole set, of what this rank trains on in each step of two epochs, and tests on."""
    train_set = partition_dataset(Images(folder, "train", samples), batch_size)
    index, epochs = train_set.dataset.index, range(2)
    steps = [[index[position] for position in step] for _ in epochs for step in train_set.batch_sampler]
    tested = partition_test_set(Images(folder, "t10k"))
    return {
        "steps": steps,
        "lengths": [len(labels) for _, labels in train_set],
        "tested": list(tested.dataset.index),
        "test_lengths": [len(labels) for _, labels in tested],
    }


def uneven_gradients(rank: int, size: int, sync: str) -> dict[str, Any]:
    """Average where rank 0 has no gradient for one parameter, nobody for another, and one does not learn."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("all", "some", "nobody", "frozen")})
    model["frozen"].requires_grad_(False)
    model["all"].grad = torch.full((2,), float(rank))
    if rank > 0:
        model["some"].grad = torch.full((2,), 6.0)
    new_grad_sync(sync, model, bucket_cap=16).after_backward()
    return {name: None if param.grad is None else param.grad.tolist() for name, param in model.items()}


def averaged_types(rank: int, size: int, sync: str) -> list[Any]:
    """Average gradients of several types and memory layouts."""
    shapes = {"a": (2, 3, 2, 2), "b": (), "c": (5,), "d": (0,)}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    model["c"] = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    for param in model.parameters():
        param.grad = torch.arange(param.numel(), dtype=param.dtype).view(param.shape) * (rank + 1)
    assert model["a"].grad is not None
    model["a"].grad = model["a"].grad.contiguous(memory_format=torch.channels_last)
    new_grad_sync(sync, model, bucket_cap=16).after_backward()
    return [(str(param.grad.dtype), param.grad.tolist()) for param in model.parameters() if param.grad is not None]


def difference_after(rank: int, size: int, change: str) -> float:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        if change == "drift" and rank == size - 1:
            model.fc2.bias[3] += 0.25
        if change == "nan" and rank == size - 1:
            model.fc2.bias[3] = float("nan")
    return largest_difference(model)


def broadcast_result(rank: int, size: int) -> list[float]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model[1].running_mean += rank
    broadcast_parameters(model)
    return [tensor.double().sum().item() for tensor in [*model.parameters(), *model.buffers()]]


def own_settings(rank: int, size: int, folder: Path) -> None:
    """Rank 2 was started with another learning rate."""
    settings = TrainingSettings(folder=folder / str(rank), lr=0.1 if rank == 2 else 0.01)
    run_training(rank, size, LESSONS["sgd"].remote("run"), settings)


def dropout_masks(rank: int, size: int, folder: Path) -> list[float]:
    """What the first random numbers of training are on this rank."""
    torch.manual_seed(0)
    train_set = partition_dataset(Images(folder, "train", 64), 16)
    test_set = partition_test_set(Images(folder, "t10k", 8))
    drawn: list[float] = []
    net = Net()
    net.conv2_drop.register_forward_hook(lambda module, args, output: drawn.append((output == 0).sum().item()))
    train(GradSync(net), train_set, test_set, TrainingSettings(folder=folder, epochs=1, batch_size=16))
    return drawn
