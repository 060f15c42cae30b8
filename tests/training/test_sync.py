"""Gradient synchronisations: whatever backward does, every parameter's gradient ends as the mean
over the ranks."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from hypothesis import given, strategies as st
from ranks import small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.lessons.mnist import Net
from playground.training.averaging import buckets, per_parameter
from playground.training.data import Images, batches, partition_dataset
from playground.training.grad_syncs import OF_GRADIENTS
from playground.training.replicas import broadcast_parameters
from playground.training.step import training_step
from playground.training.sync import (
    GradSync,
    OverlappedSync,
    all_reduce_hook,
    new_grad_sync,
)
from playground.world import RankFailed, UsageError

NONE_SAFE = [each.name for each in OF_GRADIENTS][1:]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.float64]))),
    st.integers(1, 300),
)
def test_buckets_hold_every_tensor_once_and_are_full_no_earlier_than_they_must(
    shapes: list[tuple[int, torch.dtype]], cap: int
) -> None:
    tensors = [torch.empty(length, dtype=dtype) for length, dtype in shapes]
    cut = list(buckets(tensors, cap))
    assert sorted(id(tensor) for bucket in cut for tensor in bucket) == sorted(map(id, tensors))
    for dtype in (torch.float32, torch.float64):
        of_type = [bucket for bucket in cut if bucket[0].dtype == dtype]
        in_order = [tensor for tensor in tensors if tensor.dtype == dtype]
        assert [*map(id, in_order)] == [id(tensor) for bucket in of_type for tensor in bucket]
        for bucket in of_type:
            assert {tensor.dtype for tensor in bucket} == {dtype}
            assert sum(tensor.nbytes for tensor in bucket[:-1]) < cap
        assert all(sum(tensor.nbytes for tensor in bucket) >= cap for bucket in of_type[:-1])


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


def all_branches(
    rank: int, size: int, taken: list[str]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """`branches` for every variant that allows them, with several all-reduces."""
    ways = itertools.product(NONE_SAFE, ("backend", "ring", "auto"))
    return {
        (variant, all_reduce): branches(rank, size, variant, all_reduce, taken)
        for variant, all_reduce in ways
    }


def branches(
    rank: int, size: int, variant: str, all_reduce: str, taken: list[str]
) -> list[dict[str, Any]]:
    """Two steps in which rank r takes the branch taken[r]: the averaged gradients, and what they
    should be."""
    model = Branches()
    sync = new_grad_sync(variant, model, all_reduce=load_all_reduce(all_reduce), bucket_cap=100)
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
        off = [
            (param.grad - mean).abs().max().item()
            for param, mean in zip(names.values(), expected, strict=True)
        ]
        zero = [name for name, param in names.items() if not param.grad.any()]
        steps.append({"off": max(off), "zero": zero})
        optimizer.step()
    return steps


@pytest.mark.parametrize(
    ("taken", "zero"),
    [(["abc", "cba", "b"], []), (["a", "ab"], ["layers.c.weight", "layers.c.bias"])],
)
def test_ranks_may_take_other_branches_in_another_order(
    taken: list[str], zero: list[str], world: Worlds
) -> None:
    """Gradients get ready in another order on every rank, some on no rank: no hang, and the mean
    all the same."""
    for by_way in world(len(taken), timeout=20).run(all_branches, taken):
        for way, steps in by_way.items():
            assert all(step["off"] < 1e-15 for step in steps), way
            assert all(step["zero"] == zero for step in steps), way


def tutorial_without_a_gradient(rank: int, size: int) -> None:
    """Rank 1 takes another branch; the others wait for its gradients."""
    model = Branches()
    model(torch.ones(4).double(), "ab" if rank == 1 else "abc").backward()
    per_parameter(model)


def test_the_tutorials_loop_names_the_parameter_without_a_gradient(world: Worlds) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 of 3 .*layers\.c\.weight has no gradient on\srank 1"
    ):
        world(3, timeout=20).run(tutorial_without_a_gradient)


def memory_of_gradients(rank: int, size: int, cap: int) -> dict[str, Any]:
    """Where the overlapped variant's gradients lie, over steps with both ways to zero them."""
    model = Net().to(memory_format=torch.channels_last)
    sync = OverlappedSync(model, bucket_cap=cap)
    places = []
    for set_to_none in (True, False, False, True):
        model.zero_grad(set_to_none)
        model(torch.rand(2, 1, 28, 28)).sum().backward()
        sync.after_backward()
        places.append([param.grad.data_ptr() for param in model.parameters()])
        assert all(param.grad.stride() == param.stride() for param in model.parameters())
    of_gradients = [param.grad.untyped_storage() for param in model.parameters()]
    storages = {each.data_ptr(): each.nbytes() for each in of_gradients}
    return {
        "same places": all(each == places[0] for each in places),
        "bytes": sum(storages.values()),
        "gradients": sum(param.nbytes for param in model.parameters()),
        "buckets": [bucket.flat.nbytes for bucket in sync.buckets],
    }


@pytest.mark.parametrize("cap", [1, 10_000, 25 * 2**20])
def test_overlapped_gradients_are_the_message_and_need_no_memory_beside_it(
    cap: int, world: Worlds
) -> None:
    [result, _] = world(2).run(memory_of_gradients, cap)
    assert result["same places"]
    assert result["bytes"] == result["gradients"] == sum(result["buckets"]) == 21_840 * 4
    assert len(result["buckets"]) == {1: 8, 10_000: 3, 25 * 2**20: 1}[cap]


def when_buckets_leave(rank: int, size: int) -> list[str]:
    """What happens in a backward over buckets of one layer each: gradients get ready, messages
    leave."""
    model, events = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))

    def recording(tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
        events.append("leaves")
        return dist.all_reduce(tensor, op=op, async_op=async_op)

    sync = OverlappedSync(model, recording, bucket_cap=40)
    model(torch.ones(3)).sum().backward()
    events.append("backward is done")
    sync.after_backward()
    return events


def test_a_bucket_leaves_while_backward_goes_on(world: Worlds) -> None:
    [events, same] = world(2).run(when_buckets_leave)
    assert events == same
    assert events[0].startswith("2.")
    assert events.index("leaves") < events.index("0.weight")
    assert events[-2:] == ["leaves", "backward is done"]


def two_backwards(rank: int, size: int) -> None:
    model = Branches()
    new_grad_sync("overlapped", model, bucket_cap=100)
    for _ in range(2):
        model(torch.full((4,), float(rank)).double(), "abc").backward()


def test_a_second_backward_is_an_error_with_a_remedy(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="add the losses, and call backward once"):
        world(2).run(two_backwards)


class Doubled(nn.Module):
    """The small model for images that come in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model(seed=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.inner(x.double()), dim=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Two epochs of the small model on 96 samples, by one way to average."""

    sync: str = "per-parameter"
    """Or "ddp": DistributedDataParallel."""
    batch_size: int = 12
    all_reduce: str = "backend"
    sync_every: int = 1


def new_sync(model: nn.Module, asked: Training) -> GradSync:
    if asked.sync == "ddp":
        return GradSync(DistributedDataParallel(model))
    broadcast_parameters(model)
    all_reduce = load_all_reduce(asked.all_reduce)
    return new_grad_sync(asked.sync, model, all_reduce=all_reduce, sync_every=asked.sync_every)


def trained(rank: int, size: int, folder: Path, asked: Training) -> list[float]:
    """The parameters in the end."""
    model = Doubled()
    sync = new_sync(model, asked)
    optimizer = sync.optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    train_set, _ = partition_dataset(Images(folder, "train", 96), asked.batch_size)
    steps = 96 // asked.batch_size
    for _ in range(2):
        coming = enumerate(batches(train_set, asked.batch_size), start=1)
        for step, (images, labels, samples) in coming:
            loss = partial(part_of_loss, sync.model, images, labels, samples)
            training_step(optimizer, loss, sync, last=step == steps)
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def part_of_loss(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, samples: float
) -> torch.Tensor:
    return F.nll_loss(model(images), labels, reduction="sum") / samples


def run(world: Worlds, size: int, folder: Path, **asked: Any) -> list[float]:
    first, *others = world(size).run(trained, folder, Training(**asked))
    assert all(parameters == first for parameters in others)
    return list(first)


def max_abs_diff(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def by_hook(rank: int, size: int, all_reduce: str, cap: float) -> tuple[float, list[float]]:
    """The largest difference between DistributedDataParallel with its own all-reduce and with ours;
    the parameters."""
    torch.manual_seed(0)
    start = nn.Sequential(
        nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)
    )
    models = [DistributedDataParallel(copy.deepcopy(start), bucket_cap_mb=cap) for _ in range(2)]
    models[0].register_comm_hook(load_all_reduce(all_reduce), all_reduce_hook)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    torch.manual_seed(rank)
    for _ in range(3):
        batch = torch.randn(4, 300)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    ours, theirs = (
        torch.cat([param.detach().flatten() for param in model.parameters()]) for model in models
    )
    return (ours - theirs).abs().max().item(), ours.tolist()


@pytest.mark.parametrize(
    ("size", "all_reduce", "cap"), [(2, "ring", 25.0), (3, "shared-memory", 0.1)]
)
def test_ddp_with_our_all_reduce(size: int, all_reduce: str, cap: float, world: Worlds) -> None:
    """In one bucket, and in several."""
    results = world(size).run(by_hook, all_reduce, cap)
    assert all(difference < 1e-6 for difference, _ in results)
    assert all(values == results[0][1] for _, values in results)


def test_averaging_parameters_at_every_step_is_averaging_gradients(
    world: Worlds, digits_folder: Path
) -> None:
    """SGD's step is linear in the gradients, with momentum too. Every third step is another
    algorithm."""
    gradients = run(world, 3, digits_folder)
    assert (
        max_abs_diff(run(world, 3, digits_folder, sync="parameters", all_reduce="auto"), gradients)
        < 1e-12
    )
    seldom = run(world, 3, digits_folder, sync="parameters", all_reduce="auto", sync_every=3)
    assert max_abs_diff(seldom, gradients) > 1e-3


def other_shapes(rank: int, size: int) -> None:
    """The last rank's model has a layer more."""
    layers = 2 if rank == size - 1 else 1
    broadcast_parameters(nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))))


def test_a_rank_with_another_model_is_named_before_anything_is_sent(world: Worlds) -> None:
    message = r"1.weight is not there on rank 0 and torch.float32 \[3, 3\] on rank 2"
    with pytest.raises(UsageError, match=message):
        world(3, timeout=20).run(other_shapes)
