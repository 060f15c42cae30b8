"""The optimizer's step on flat tensors, and in shared memory: the same as on the model's
parameters."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from torch import nn

from playground.algorithms.shared_memory import add_all
from playground.training import flat_step
from playground.training.flat_step import FlatStep, new_shared_step
from playground.training.step import backward, training_step
from playground.training.sync import new_grad_sync

SYNCS = {"flat": FlatStep, "shared": new_shared_step}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


class Branches(nn.Module):
    """A layer that only even ranks use, one of another type, one that nobody trains, and a
    channels_last one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        self.even, self.out = nn.Linear(12, 12), nn.Linear(12, 2).double()
        self.fixed = nn.Parameter(torch.ones(12), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(inputs).flatten(1)
        hidden = self.even(hidden) if dist.get_rank() % 2 == 0 else hidden
        return self.out((hidden * self.fixed).double())


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().sum()


def train(rank: int, size: int, name: str, steps: int, optimizer: str) -> dict[str, Any]:
    """The largest difference to the same training by `none-safe`, after all steps; parameters of
    this rank."""
    torch.manual_seed(0)
    start = Branches()
    models = {"ours": copy.deepcopy(start), "theirs": copy.deepcopy(start)}
    new_optimizer = OPTIMIZERS[optimizer]
    syncs = {
        "ours": SYNCS[name](models["ours"]),
        "theirs": new_grad_sync("none-safe", models["theirs"]),
    }
    optimizers = {each: sync.optimizer(new_optimizer) for each, sync in syncs.items()}
    torch.manual_seed(rank)
    for _ in range(steps):
        batch = torch.randn(2, 1, 4, 4)
        for each, model in models.items():
            training_step(optimizers[each], partial(loss_of, model, batch), syncs[each])
    pairs = zip(models["ours"].parameters(), models["theirs"].parameters(), strict=True)
    flat = torch.cat([param.detach().flatten().double() for param in models["ours"].parameters()])
    strides = models["ours"].conv.weight.stride() == start.conv.weight.stride()
    dist.barrier()
    return {
        "difference": max((ours - theirs).abs().max().item() for ours, theirs in pairs),
        "values": flat.tolist(), "strides": strides,
    }  # fmt: skip


@pytest.mark.parametrize(("size", "optimizer"), [(1, "sgd"), (3, "sgd"), (3, "adam")])
@pytest.mark.parametrize("name", SYNCS)
def test_steps_are_those_of_the_optimizer(
    name: str, size: int, optimizer: str, world: Worlds
) -> None:
    """Also for a gradient that some ranks do not have."""
    results = world(size).run(train, name, 5, optimizer)
    assert all(result["difference"] < 1e-6 for result in results), results
    assert all(result["values"] == results[0]["values"] and result["strides"] for result in results)


def test_ranks_of_several_hosts_have_no_memory_for_all(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    results = world(4).run(train, "shared", 2, "sgd")
    assert all(result["difference"] < 1e-6 for result in results), results


def be_late(rank: int, size: int) -> tuple[list[float], float]:
    """How far gradients, by step, and parameters in the end are from those of `none-safe`, where
    rank 1 is late to add up, and rank 0 to step. The second step is left out."""
    torch.manual_seed(0)
    start, found, ends = nn.Linear(4, 4, bias=False), list[Any](), list[torch.Tensor]()
    for way in ("shared", "none-safe"):
        model = copy.deepcopy(start)
        sync: Any = new_shared_step(model) if way == "shared" else new_grad_sync(way, model)
        optimizer = sync.optimizer(OPTIMIZERS["sgd"])
        for step in range(4):
            backward(optimizer, partial(loss_of, model, torch.ones(4) + rank + step), sync)
            gradients = model.weight.grad.flatten().chunk(size)[rank]
            found.append((sync.flat_params[0].shard.grad if way == "shared" else gradients).clone())
            if step != 1:
                time.sleep(0.05 * (rank == 0))
                optimizer.step()
                sync.after_step(last=step == 3)
        ends.append(model.weight.detach().clone())
    off = [
        (one - other).abs().max().item() for one, other in zip(found[:4], found[4:], strict=True)
    ]
    return off, (ends[0] - ends[1]).abs().max().item()


def be_late_to_add_up(rank: int, size: int) -> tuple[list[float], float]:
    def add_late(*args: Any, **named: Any) -> None:
        time.sleep(0.05 * (rank == 1))
        add_all(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_step, "add_all", add_late)
        return be_late(rank, size)


def test_ranks_that_share_memory_wait_for_each_other(world: Worlds) -> None:
    """Nobody overwrites gradients, or reads parameters, that another rank is still to read or to
    write."""
    for off, at_the_end in world(2).run(be_late_to_add_up):
        assert max(*off, at_the_end) < 1e-3, off
