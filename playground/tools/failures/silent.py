"""Training that is silently wrong: nothing is raised, and what `--check` looks at says why."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler

STEPS = 4


def spread(model: nn.Module) -> float:
    """How far the parameters of the ranks are apart."""
    lowest = parameters_to_vector(model.parameters()).detach()
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return round((highest - lowest).max().item(), 4)


def backward(model: nn.Module) -> None:
    """Forward and backward of a batch of this rank's."""
    inputs = torch.arange(4.0).view(4, 1) + dist.get_rank()
    model(inputs).square().mean().backward()


def bypassed_wrapper(rank: int, size: int) -> float:
    """The model inside DistributedDataParallel is called, so nothing is averaged."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model.module)
        optimizer.step()
    return spread(model)


def bypassed_wrapper_cured(rank: int, size: int) -> float:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return spread(model)


def no_sync_last(rank: int, size: int) -> float:
    """`no_sync` is around the last micro-batch, whose gradients are then not averaged."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        with model.no_sync():
            backward(model)
        optimizer.step()
    return spread(model)


def no_sync_last_cured(rank: int, size: int) -> float:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model)
        backward(model)
        optimizer.step()
    return spread(model)


def unfrozen_late(rank: int, size: int) -> float:
    """A parameter is trained that did not require a gradient when it was wrapped."""
    net = nn.Linear(1, 1)
    net.bias.requires_grad_(False)
    model = DistributedDataParallel(net)
    net.bias.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return spread(model)


def unfrozen_late_cured(rank: int, size: int) -> float:
    net = nn.Linear(1, 1)
    net.bias.requires_grad_(False)
    net.bias.requires_grad_(True)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return spread(model)


def other_start(rank: int, size: int) -> float:
    """Gradients are averaged, and the parameters differ from the start."""
    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= size
        optimizer.step()
    return spread(model)


def other_start_cured(rank: int, size: int) -> float:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= size
        optimizer.step()
    return spread(model)


def reduce_to_one(rank: int, size: int) -> float:
    """Rank 0 gets the sum of the gradients, and all ranks step."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        for param in model.parameters():
            dist.reduce(param.grad, dst=0)
            param.grad /= size
        optimizer.step()
    return spread(model)


def reduce_to_one_cured(rank: int, size: int) -> float:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= size
        optimizer.step()
    return spread(model)


def summed_again(rank: int, size: int) -> float:
    """Averages of DistributedDataParallel are summed: the steps are as many times as long."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        dist.all_reduce(net.weight.grad)
        optimizer.step()
    return net.weight.item()


def summed_again_cured(rank: int, size: int) -> float:
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()
    return net.weight.item()


def not_divided(rank: int, size: int) -> float:
    """The sum of the ranks' gradients is taken for their mean."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.ones(1)).mean().backward()
        dist.all_reduce(net.weight.grad)
        optimizer.step()
    return net.weight.item()


def not_divided_cured(rank: int, size: int) -> float:
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.ones(1)).mean().backward()
        dist.all_reduce(net.weight.grad)
        net.weight.grad /= size
        optimizer.step()
    return net.weight.item()


def optimizer_of_a_copy(rank: int, size: int) -> bool:
    """The optimizer has the parameters of a model of which a copy is trained."""
    net = nn.Linear(1, 1)
    model = DistributedDataParallel(copy.deepcopy(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    before = [param.clone() for param in model.parameters()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    after = [*model.parameters()]
    return not all(map(torch.equal, before, after))


def optimizer_of_a_copy_cured(rank: int, size: int) -> bool:
    net = nn.Linear(1, 1)
    model = DistributedDataParallel(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [param.clone() for param in model.parameters()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    after = [*model.parameters()]
    return not all(map(torch.equal, before, after))


def count_samples(sampler: DistributedSampler[int], size: int) -> int:
    """How many samples the ranks of a wrapped model train on together."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[int] = []
    for batch in DataLoader(range(12 * size), 4, sampler=sampler):
        optimizer.zero_grad()
        model(batch.view(-1, 1).float()).mean().backward()
        optimizer.step()
        seen += batch.tolist()
    parts: list[list[int]] = [[]] * size
    dist.all_gather_object(parts, seen)
    return len({sample for part in parts for sample in part})


def sampler_seeds(rank: int, size: int) -> int:
    """Each rank shuffles with a seed of its own, so that samples come twice or not at all."""
    data = range(12 * size)
    sampler = DistributedSampler(data, seed=rank)
    return count_samples(sampler, size)


def sampler_seeds_cured(rank: int, size: int) -> int:
    data = range(12 * size)
    sampler = DistributedSampler(data, seed=0)
    return count_samples(sampler, size)


def lost_result(rank: int, size: int) -> float:
    """A dense copy is reduced, and the tensor stays as it was."""
    table = torch.ones(2, 3).t()
    dist.all_reduce(table.contiguous())
    return table.sum().item()


def lost_result_cured(rank: int, size: int) -> float:
    table = torch.ones(2, 3).t()
    dense = table.contiguous()
    dist.all_reduce(dense)
    return dense.sum().item()
