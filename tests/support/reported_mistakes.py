"""More programs that train with a silent mistake, of kinds that users have reported, and right ones
that look like them. As in `silent_mistakes`, each is called on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from silent_mistakes import (
    MANY_STEPS,
    STEPS,
    WIDTH,
    Wrong,
    average,
    begin,
    kept,
    loss_of,
    new_net,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from playground.explain.right.finding import HINT, PROBABLE, SURE


def begin_by_hand(net: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    torch.manual_seed(dist.get_rank() + 1)
    return optimizer


def gradients_of(net: nn.Module) -> list[Tensor]:
    return [param.grad for param in net.parameters() if param.grad is not None]


# Wrong


def loss_reduced() -> None:
    """To average the loss does not average the gradients."""
    net = new_net()
    optimizer = begin_by_hand(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net)
        dist.all_reduce(loss)  # told
        (loss / dist.get_world_size()).backward()
        optimizer.step()


def head_without_optimizer() -> None:
    model = DistributedDataParallel(new_net())
    optimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(MANY_STEPS):
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()  # told


def more_parts_than_ranks() -> None:
    """`num_replicas` is the number of GPUs of another machine."""
    model, optimizer = begin(new_net())
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(64, WIDTH))
    sampler = DistributedSampler(data, num_replicas=4, rank=dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in DataLoader(data, 4, sampler=sampler):  # told
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


def other_layout() -> None:
    """The model of rank 0 alone is in channels_last."""
    weight = torch.arange(24.0).reshape(2, 3, 2, 2)
    if dist.get_rank() == 0:
        weight = weight.contiguous(memory_format=torch.channels_last)
    dist.broadcast(weight, 0)  # told
    assert (weight.flatten() == torch.arange(24.0)).all() == (dist.get_rank() == 0)


def transposed_on_one_rank() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    if dist.get_rank():
        table = table.t().contiguous().t()
    dist.all_reduce(table)  # told
    assert not table.equal(2 * torch.arange(6.0).reshape(2, 3))


def broadcast_from_the_wrong_rank() -> None:
    net = new_net()
    saved = copy.deepcopy(net.state_dict())
    if dist.get_rank() == 0:
        net.load_state_dict(saved)
    for param in net.parameters():
        dist.broadcast(param.data, 1)  # told
    optimizer = begin_by_hand(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        optimizer.step()


def reduced_early_and_late() -> None:
    """A rank notes its accuracy before the loss, another one after it."""
    net = new_net()
    optimizer = begin_by_hand(net)
    rank = dist.get_rank()
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        average(gradients_of(net))
        right, total = torch.ones(1), loss.detach().reshape(1).clone()
        for turn in (0, 1):
            if turn == (rank if number == 2 else 0):
                dist.all_reduce(right)  # told
            else:
                dist.all_reduce(total)
        optimizer.step()


def noise_of_each_rank() -> None:
    """Noise is added to gradients that are averaged already."""
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        for gradient in gradients_of(model):
            gradient += 0.01 * torch.randn_like(gradient)
        optimizer.step()  # told


WRONG = (
    Wrong(noise_of_each_rank, "D12-gradient", PROBABLE),
    Wrong(loss_reduced, "M7-loss", HINT),
    Wrong(head_without_optimizer, "O2-unowned", HINT),
    Wrong(more_parts_than_ranks, "S9-replicas", HINT),
    Wrong(other_layout, "G2-strides", SURE),
    Wrong(transposed_on_one_rank, "G2-strides", SURE),
    Wrong(broadcast_from_the_wrong_rank, "R1-source", PROBABLE),
    Wrong(reduced_early_and_late, "P1-shift", HINT),
)


# Right


def noise_shared_by_all_ranks() -> None:
    model, optimizer = begin(new_net())
    shared = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        for gradient in gradients_of(model):
            gradient += 0.01 * torch.randn(gradient.shape, generator=shared)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def loss_shown() -> None:
    """The loss is reduced for the log, in the graph, and gradients are averaged."""
    net = new_net()
    optimizer = begin_by_hand(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net)
        shown = loss * 1
        dist.all_reduce(shown)
        loss.backward()
        average(gradients_of(net))
        optimizer.step()


def two_optimizers_of_one_model() -> None:
    model = DistributedDataParallel(new_net())
    optimizers = [torch.optim.SGD(model.module[at].parameters(), lr=0.1) for at in (0, 2)]
    torch.manual_seed(dist.get_rank() + 1)
    for number in range(STEPS):
        loss_of(model).backward()
        optimizers[number % 2].step()
        model.zero_grad()
    loss_of(model).backward()  # gradients to look at
    kept[:] = [model]


def optimizer_that_is_gone() -> None:
    """The head was trained first, by an optimizer of its own."""
    model = DistributedDataParallel(new_net())
    torch.manual_seed(dist.get_rank() + 1)
    for at in (2, 0):
        optimizer = torch.optim.SGD(model.module[at].parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    kept[:] = [model]


def all_parts_one_after_the_other() -> None:
    """Four parts of the data, two for each rank."""
    model, optimizer = begin(new_net())
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(64, WIDTH))
    for part in range(dist.get_rank(), 4, 2):
        sampler = DistributedSampler(data, num_replicas=4, rank=part)
        for (inputs,) in DataLoader(data, 4, sampler=sampler):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


def optimizer_that_trains_late() -> None:
    """The loss of the head begins, and ends, at steps that are not looked at for their number."""
    body, head = new_net(), nn.Linear(WIDTH, 1)
    model = DistributedDataParallel(nn.ModuleDict({"body": body, "head": head}))
    optimizers = [begin_by_hand(each) for each in (body, head)]
    for number in range(26):
        model.zero_grad()
        loss_of(body).backward()
        if 20 <= number < 24:
            loss_of(head).backward()
        average(gradients_of(model))
        for each in optimizers:
            each.step()


def head_updated_by_hand() -> None:
    model = DistributedDataParallel(new_net())
    head = model.module[2]
    optimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(MANY_STEPS):
        model.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        with torch.no_grad():
            for param in head.parameters():
                param -= 0.1 * param.grad
    kept[:] = [model]


def one_layout_on_all_ranks() -> None:
    image = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    table = torch.arange(6.0).reshape(2, 3).t()
    row = torch.ones(1, 3) if dist.get_rank() else torch.ones(3, 1).t()
    for each in (image, table, row):
        dist.all_reduce(each)
        dist.broadcast(each, 0)
    assert table.equal(2 * torch.arange(6.0).reshape(2, 3).t())


def flat_view_of_another_layout() -> None:
    """Each rank reduces the elements in the order in which they are in memory."""
    image = torch.ones(2, 3, 4, 4)
    if dist.get_rank():
        dist.all_reduce(image.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1))
    else:
        dist.all_reduce(torch.ones(2, 4, 4, 3))


def broadcast_from_the_rank_that_has_loaded() -> None:
    net = new_net()
    saved = copy.deepcopy(net.state_dict())
    if dist.get_rank() == 0:
        net.load_state_dict(saved)
    for param in net.parameters():
        dist.broadcast(param.data, 0)


def loaded_on_all_and_broadcast() -> None:
    net = new_net()
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    for param in net.parameters():
        dist.broadcast(param.data, 1)


def calls_of_branches() -> None:
    """The ranks make one call at different lines."""
    net = new_net()
    optimizer = begin_by_hand(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(3), 0)
        else:
            dist.broadcast(torch.empty(3), 0)
        optimizer.step()


RIGHT: tuple[Any, ...] = (
    noise_shared_by_all_ranks, loss_shown, two_optimizers_of_one_model, optimizer_that_is_gone,
    all_parts_one_after_the_other, optimizer_that_trains_late, head_updated_by_hand,
    one_layout_on_all_ranks, flat_view_of_another_layout, broadcast_from_the_rank_that_has_loaded,
    loaded_on_all_and_broadcast, calls_of_branches,
)  # fmt: skip
