"""What the tests of the rungs let ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.algorithms.messages import observed
from playground.runtime import device
from playground.training.data import Images, partition_dataset, partition_test_set, training_images
from playground.training.loop import train
from playground.training.net import Net
from playground.training.overlap import OverlappedAverage
from playground.training.replicas import broadcast_parameters
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync, build_grad_sync, new_grad_sync


class Branches(nn.Module):
    """Three layers, of which each forward takes those named in `taken`, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4).double() for name in "abc"})

    def forward(self, x: torch.Tensor, taken: str) -> torch.Tensor:
        for name in taken:
            x = self.layers[name](x).tanh()
        return x.sum()


def branches(rank: int, size: int, rung: str, all_reduce: str, taken: list[str]) -> list[dict[str, Any]]:
    """Two steps in which rank r takes the branch taken[r]: the averaged gradients, and what they should be."""
    model = Branches()
    sync = new_grad_sync(rung, model, load_all_reduce(all_reduce), bucket_cap=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(2):
        inputs = [torch.arange(4.0).double() + other + step for other in range(size)]
        expected = [torch.zeros_like(param) for param in model.parameters()]
        for other in range(size):
            alone = Branches()
            alone.load_state_dict(model.state_dict())
            alone(inputs[other], taken[other]).backward()
            for mean, param in zip(expected, alone.parameters(), strict=True):
                mean += 0 if param.grad is None else param.grad / size
        optimizer.zero_grad()
        model(inputs[rank], taken[rank]).backward()
        sync.after_backward()
        names = dict(model.named_parameters())
        assert all(param.grad is not None for param in names.values())
        off = [(param.grad - mean).abs().max().item() for param, mean in zip(names.values(), expected, strict=True)]
        zero = [name for name, param in names.items() if not param.grad.any()]
        steps.append({"off": max(off), "zero": zero})
        optimizer.step()
    return steps


def tutorial_without_a_gradient(rank: int, size: int) -> None:
    """Rank 1 takes another branch; the others wait for its gradients."""
    model = Branches()
    sync = new_grad_sync("per-parameter", model)
    model(torch.ones(4).double(), "ab" if rank == 1 else "abc").backward()
    sync.after_backward()


def memory_of_gradients(rank: int, size: int, cap: int) -> dict[str, Any]:
    """Where the overlapped rung's gradients lie, over steps with both ways to zero them."""
    model = Net().to(memory_format=torch.channels_last)
    sync = OverlappedAverage(model, bucket_cap=cap)
    places = []
    for set_to_none in (True, False, False, True):
        model.zero_grad(set_to_none)
        model(torch.rand(2, 1, 28, 28)).sum().backward()
        sync.after_backward()
        places.append([param.grad.data_ptr() for param in model.parameters()])
        assert all(param.grad.stride() == param.stride() for param in model.parameters())
    storages = {param.grad.untyped_storage().data_ptr(): param.grad.untyped_storage().nbytes() for param in
                model.parameters()}  # fmt: skip
    return {
        "same places": all(each == places[0] for each in places),
        "bytes": sum(storages.values()),
        "gradients": sum(param.nbytes for param in model.parameters()),
        "buckets": [bucket.flat.nbytes for bucket in sync.buckets],
    }


def when_buckets_leave(rank: int, size: int) -> list[str]:
    """What happens in a backward over buckets of one layer each: gradients get ready, messages leave."""
    model, events = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))

    def recording(tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
        events.append("leaves")
        return dist.all_reduce(tensor, op=op, async_op=async_op)

    sync = OverlappedAverage(model, recording, bucket_cap=40)
    model(torch.ones(3)).sum().backward()
    events.append("backward is done")
    sync.after_backward()
    return events


def two_backwards(rank: int, size: int, rung: str, under_no_sync: bool) -> float:
    """Two backwards before one averaging: how far the result is from the mean of the sums."""
    model = Branches()
    sync = new_grad_sync(rung, model, bucket_cap=100)
    inputs = [torch.full((4,), float(other)).double() for other in range(size)]
    if under_no_sync:
        with sync.no_sync():
            model(inputs[rank], "ab").backward()  # "c" has its first gradient from the second, "a" its last from here
        model(inputs[rank], "bc").backward()
    else:
        model(inputs[rank], "abc").backward()
        model(inputs[rank], "abc").backward()
    sync.after_backward()
    alone = Branches()
    for given in inputs:
        (alone(given, "ab") / size).backward()
        (alone(given, "bc") / size).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)


class Doubled(nn.Module):
    """The small model for images that come in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model(seed=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.inner(x.double()), dim=1)


def trained(rank: int, size: int, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train the small model with these settings ("ddp" as `sync` wraps it): its parameters in the end."""
    model: nn.Module = Doubled()
    in_ddp = settings.get("sync") == "ddp"
    chosen = TrainingSettings(folder=folder, **{**settings, "sync": "flat"} if in_ddp else settings)
    train_set = partition_dataset(training_images(chosen), chosen.batch_size)
    if in_ddp:
        sync = GradSync(DistributedDataParallel(model))
    else:
        broadcast_parameters(model)
        sync = build_grad_sync(model, chosen)
    messages = 0

    def count(*_: Any) -> None:
        nonlocal messages
        messages += 1

    with observed(count):
        result = train(sync, train_set, partition_test_set(Images(folder, "t10k", 8)), chosen)
    parameters = torch.cat([param.detach().flatten() for param in model.parameters()])
    return {
        "parameters": parameters.tolist(), "difference": result.replicas_max_difference, "messages": messages,
        "loss": result.epochs[-1].loss,
    }  # fmt: skip


def fetched(rank: int, size: int, folder: Path, loader: str) -> list[Any]:
    """All batches of two epochs."""
    batches = partition_dataset(training_images(TrainingSettings(folder=folder, limit=17, loader=loader)), 8)
    return [(images.tolist(), labels.tolist(), str(images.dtype)) for _ in range(2) for images, labels in batches]


def other_shapes(rank: int, size: int, how: str) -> None:
    """The last rank's model has another width, or a layer more."""
    odd = rank == size - 1
    model = nn.Sequential(nn.Linear(4, 5 if odd and how == "width" else 3))
    if odd and how == "layer":
        model.append(nn.Linear(3, 3))
    broadcast_parameters(model)


def several_at_once(rank: int, size: int, name: str) -> list[float]:
    """Asynchronous all-reduces of tensors of many sizes, a synchronous one among them."""
    all_reduce = load_all_reduce(name)
    tensors = [torch.full((length,), rank + 1.0 + length, device=device()) for length in (1, 5, 100_000, 0, 3)]
    works: list[Any] = [all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.full((7,), rank + 1.0, device=device())
    assert all_reduce(last) is None
    assert all(work.wait() and work.is_completed() for work in works)
    assert all((tensor == tensor[0]).all() for tensor in [*tensors, last] if len(tensor))
    return [tensor[0].item() for tensor in [*tensors, last] if len(tensor)]


def failure_at_wait(rank: int, size: int) -> str:
    def fail(*_: Any) -> None:
        raise ValueError("no more")

    with observed(fail):
        work: Any = load_all_reduce("ring")(torch.ones(10), async_op=True)
        try:
            work.wait()
        except ValueError as error:
            return str(error)
    return "nothing was raised"
