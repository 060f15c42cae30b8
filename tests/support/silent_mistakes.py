"""Programs that train with a silent mistake, and right ones of the same shapes. Each is called on
every rank, is given what it draws its data from, and leaves it to its caller to compare the ranks.

In a wrong program, `# told` marks the line that is to be named."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from playground.explain.right.finding import HINT, PROBABLE, SURE, Level
from playground.explain.right.log import FIRST_STEPS

WIDTH, STEPS = 6, 5
MANY_STEPS = 45
"""So many that not all are looked at, the last one included."""


def new_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))


def begin(net: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A wrapped model and its optimizer. From now on, each rank draws its own batches."""
    model = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    torch.manual_seed(dist.get_rank() + 1)
    return model, optimizer


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
    return loss


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


# Replicas of DistributedDataParallel


def module_inside(steps: int = STEPS) -> None:
    model, optimizer = begin(new_net())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model.module).backward()  # told
        optimizer.step()


def never_synchronized() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            with model.no_sync():
                loss = model(torch.randn(4, WIDTH)).square().mean()  # told
            loss.backward()
        optimizer.step()


def first_synchronized() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        with model.no_sync():
            model(torch.randn(4, WIDTH)).square().mean().backward()  # told
        optimizer.step()


def first_synchronized_then_loaded() -> None:
    """What a load has made equal was not equal before."""
    model, optimizer = begin(new_net())
    start = {name: value.clone() for name, value in model.module.state_dict().items()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        with model.no_sync():
            model(torch.randn(4, WIDTH)).square().mean().backward()  # told
        optimizer.step()
    model.module.load_state_dict(start)


def unfrozen_later() -> None:
    net = new_net()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)  # told
    net[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        step(model, optimizer)


def layer_added_later() -> None:
    net = new_net()
    model = DistributedDataParallel(net)
    net.append(nn.Linear(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()  # told
        optimizer.step()


def penalty_apart() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        weights = parameters_to_vector(model.module.parameters())
        (torch.rand(()) * weights.square().sum()).backward()  # told
        optimizer.step()


def stepping_in_backward() -> None:
    model = DistributedDataParallel(new_net())
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    torch.manual_seed(dist.get_rank() + 1)

    def update(param: Tensor) -> None:
        optimizers[param].step()  # told
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        loss_of(model).backward()


def step_left_out(steps: int = 8, left_out: int = 3) -> None:
    model, optimizer = begin(new_net())
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        if number != left_out or dist.get_rank() == 0:
            optimizer.step()  # told


def late_step_left_out() -> None:
    step_left_out(steps=70, left_out=40)


def loaded_on_one_rank() -> None:
    model, optimizer = begin(new_net())
    saved = copy.deepcopy(model.module.state_dict())
    for number in range(STEPS):
        step(model, optimizer)
        if number == 2 and dist.get_rank() == 1:
            model.module.load_state_dict(saved)  # told


def written_on_one_rank() -> None:
    model, optimizer = begin(new_net())
    for number in range(STEPS):
        if number == 2 and dist.get_rank() == 0:
            nn.init.ones_(model.module[0].weight)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()  # told


def scheduled_on_one_rank() -> None:
    model, optimizer = begin(new_net())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()  # told
        if dist.get_rank() == 0:
            scheduler.step()


def scheduled_by_own_losses() -> None:
    """Each rank halves its learning rate when its own loss has stood still: steps that nobody looks
    at have other rates, and the next look finds them equal again."""
    model, optimizer = begin(new_net())
    for number in range(20):
        if number == 13 + dist.get_rank():
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()  # told


def momentum_on_one_rank() -> None:
    model, optimizer = begin(new_net())
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()  # told
        if number == 1 and dist.get_rank() == 0:
            optimizer.state.clear()


def hook_without_average() -> None:
    model, optimizer = begin(new_net())

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()  # told
        optimizer.step()


def built_in_another_order() -> None:
    torch.manual_seed(0)
    names = ["left", "right"] if dist.get_rank() == 0 else ["right", "left"]
    net = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
    DistributedDataParallel(net)  # told


# Averaging by hand


def begin_by_hand(*, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    return net, optimizer


def gradients_of(net: nn.Module) -> list[Tensor]:
    return [param.grad for param in net.parameters() if param.grad is not None]


def average(tensors: list[Tensor], group: Any = None) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= dist.get_world_size(group)


def other_start() -> None:
    net, optimizer = begin_by_hand(seed=dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        for gradient in gradients_of(net):
            dist.all_reduce(gradient)  # told
            gradient /= dist.get_world_size()
        optimizer.step()


def other_start_in_one_buffer() -> None:
    """No call takes a gradient itself."""
    net, optimizer = begin_by_hand(seed=dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average_flat(net)
        optimizer.step()  # told


def average_flat(net: nn.Module) -> None:
    gradients = gradients_of(net)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def averaged_after_step() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
        for gradient in gradients_of(net):
            dist.all_reduce(gradient)  # told


def parameter_in_place_of_gradient() -> None:
    net, optimizer = begin_by_hand()

    def reduce(param: Tensor) -> None:
        dist.all_reduce(param)  # told
        param /= dist.get_world_size()

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    for _ in range(STEPS):
        step(net, optimizer)


def reduced_to_one() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        for gradient in gradients_of(net):
            dist.reduce(gradient, 0)  # told
        optimizer.step()


def averaged_in_part() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        for gradient in gradients_of(net[0]):
            dist.all_reduce(gradient)  # told
            gradient /= dist.get_world_size()
        optimizer.step()


def step_left_out_by_hand() -> None:
    net, optimizer = begin_by_hand()
    for number in range(8):
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        if number != 4 or dist.get_rank() == 1:
            optimizer.step()  # told


def other_order() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(WIDTH)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.01)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((params[0] * torch.randn(WIDTH)).sum() - params[1].square().sum()).square().backward()
        for param in params if dist.get_rank() else reversed(params):
            dist.all_reduce(param.grad)  # told
        optimizer.step()


# Data


def new_data(count: int = 24) -> TensorDataset:
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train_on(loader: DataLoader[Any], model: Any, optimizer: torch.optim.Optimizer) -> None:
    for batch, target in loader:  # told
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()


def without_sampler() -> None:
    model, optimizer = begin(new_net())
    for batch, target in DataLoader(new_data(), batch_size=6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()  # told
        optimizer.step()


class Drawn(Dataset[Tensor]):
    """Samples that are drawn when they are asked for."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> Tensor:
        return torch.randn(WIDTH)


def samples_drawn_alike() -> None:
    model, optimizer = begin(new_net())
    torch.manual_seed(0)
    data = Drawn()
    for batch in DataLoader(data, batch_size=3, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()  # told
        optimizer.step()


def batches_drawn_alike() -> None:
    model, optimizer = begin(new_net())
    torch.manual_seed(0)
    for _ in range(FIRST_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()  # told
        optimizer.step()


def batches_drawn_alike_by_hand() -> None:
    net, optimizer = begin_by_hand()
    torch.manual_seed(0)
    for _ in range(FIRST_STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        for grad in gradients_of(net):
            dist.all_reduce(grad)  # told
            grad /= dist.get_world_size()
        optimizer.step()


def other_seeds() -> None:
    data = new_data()
    sampler = DistributedSampler(data, seed=dist.get_rank())
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model, optimizer = begin(new_net())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)


def other_epochs() -> None:
    data = new_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model, optimizer = begin(new_net())
    for epoch in range(2):
        if dist.get_rank() == 0:
            sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)


def one_epoch_again() -> None:
    data = new_data()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model, optimizer = begin(new_net())
    for _ in range(2):
        train_on(loader, model, optimizer)


def split_apart() -> None:
    chance = torch.Generator().manual_seed(dist.get_rank())
    data, _ = random_split(new_data(), [16, 8], generator=chance)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model, optimizer = begin(new_net())
    train_on(loader, model, optimizer)


def evaluated_with_padding() -> None:
    data = new_data(23)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model, _ = begin(new_net())
    with torch.no_grad():
        for batch, _ in loader:  # told
            model(batch)


def called_from_outside() -> None:
    first = dist.new_group([0])
    with warnings.catch_warnings(action="ignore"):
        dist.broadcast(torch.ones(2), src=0, group=first)  # told


def evaluated_on_one_rank_in_part() -> None:
    data = new_data(23)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model, optimizer = begin(new_net())
    step(model, optimizer)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for batch, _ in loader:  # told
                model.module(batch)


class Stream(IterableDataset[Tensor]):
    """Numbers that all workers have, or that they share."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker
        first, step = (worker.id, worker.num_workers) if self.is_shared else (0, 1)
        yield from torch.arange(16.0)[first::step]


def repeated_by_workers() -> None:
    for _ in DataLoader(Stream(is_shared=False), batch_size=2, num_workers=2):  # told
        pass


def trained_apart_on_parts() -> None:
    data, net = new_data(), new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch, target in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch), target).backward()
        optimizer.step()  # told


def folds_without_average() -> None:
    """A new model for each fold, of whose samples each rank takes its part by hand. The loss is
    averaged to be told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for fold in range(2):
        part = Subset(new_data(), [*range(12 * fold + rank, 12 * fold + 12, size)])
        net = new_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch, target in DataLoader(part, batch_size=2):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(batch), target)
            loss.backward()
            optimizer.step()  # told
        average([loss.detach()])


def same_part_for_all() -> None:
    net, optimizer = begin_by_hand()
    for batch, target in DataLoader(new_data(), batch_size=4):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch), target).backward()
        for grad in gradients_of(net):
            dist.all_reduce(grad)  # told
            grad /= dist.get_world_size()
        optimizer.step()


def same_masks() -> None:
    model, optimizer = begin(nn.Sequential(new_net(), nn.Dropout(0.5)))
    torch.manual_seed(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = torch.full((4, WIDTH), 1.0 + step + 0.1 * dist.get_rank())
        model(batch).square().mean().backward()  # told
        optimizer.step()


def classify(ignored: int, *, by_sum: bool = False) -> None:
    """Train on 12 tokens of each rank, of which the last ones are ignored."""
    model, optimizer = begin(nn.Linear(WIDTH, 3))
    target = torch.arange(12) % 3
    target[12 - ignored :] = -100
    count = torch.tensor([12.0 - ignored])
    dist.all_reduce(count)
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = model(torch.randn(12, WIDTH))
        if by_sum:
            loss = nn.functional.cross_entropy(outputs, target, reduction="sum")
            loss = loss * dist.get_world_size() / count
        else:
            loss = nn.functional.cross_entropy(outputs, target)
        loss.backward()  # told
        optimizer.step()


def padded_to_other_lengths() -> None:
    classify(6 * dist.get_rank())


# Optimizers


def statistics_of_ranks() -> None:
    net = nn.Sequential(nn.BatchNorm1d(WIDTH), new_net())
    model, optimizer = begin(net, broadcast_buffers=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()  # told


def optimizer_of_a_copy() -> None:
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(copy.deepcopy(net))
    for _ in range(MANY_STEPS):
        loss_of(model).backward()
        optimizer.step()  # told


def optimizer_made_before_sharding() -> None:
    net = nn.Sequential(new_net(), nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    shard(net)
    for _ in range(MANY_STEPS):
        loss_of(net).backward()
        optimizer.step()  # told


def averaged_and_summed() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        for grad in gradients_of(model):
            dist.all_reduce(grad)  # told
        optimizer.step()


def summed_and_not_divided() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        for grad in gradients_of(net):
            dist.all_reduce(grad)  # told
        optimizer.step()


# Files


def shared_path() -> Path:
    return Path(tempfile.gettempdir(), f"silent-mistakes-{os.getppid()}.pt")


def loaded_while_saved() -> None:
    shared_path().touch()
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(torch.ones(3), shared_path())
    with contextlib.suppress(Exception):  # it may be empty still
        torch.load(shared_path())  # told
    dist.barrier()
    if dist.get_rank() == 0:
        shared_path().unlink()


def saved_by_all() -> None:
    torch.save(torch.ones(3), shared_path())  # told
    dist.barrier()
    if dist.get_rank() == 0:
        shared_path().unlink()


# Single calls


def copy_reduced() -> None:
    table = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(table.contiguous())  # told
    assert table.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def rounded_copy_reduced() -> None:
    table = torch.ones(3)
    dist.all_reduce(table.double())  # told


def never_waited_for() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True)  # told


def gathered_without_gradient() -> None:
    net = new_net()
    features = net(torch.randn(4, WIDTH))
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)  # told


def column_reduced() -> None:
    tensor = torch.arange(8.0).view(4, 2)[:, 1]
    dist.all_reduce(tensor)  # told
    assert tensor.tolist() != [2.0, 6.0, 10.0, 14.0]


def column_broadcast() -> None:
    tensor = torch.arange(8.0).view(4, 2)[:, 1] * (1 - dist.get_rank())
    table = torch.full((4, 2), -1.0)
    table[:, 1] = tensor
    dist.broadcast(table[:, 1], 0)  # told
    assert dist.get_rank() == 0 or table[:, 1].tolist() != [1.0, 3.0, 5.0, 7.0]


def written_under_way() -> None:
    tensor = torch.ones(2**16)
    work: Any = dist.all_reduce(tensor, async_op=True)  # told
    tensor.mul_(2)
    work.wait()


def sent_and_written() -> None:
    tensor = torch.zeros(2**16)
    if dist.get_rank() == 0:
        work: Any = dist.isend(tensor, 1)  # told
        tensor.fill_(1)
        work.wait()
    else:
        dist.recv(tensor, 0)


def clipped_before_average() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        for param in net.parameters():
            dist.all_reduce(param.grad)  # told
            param.grad /= dist.get_world_size()
        optimizer.step()


def train_on_all(indices: list[int], every: int, count: int) -> None:
    """Train on every so many-th sample, from that of this rank on, in random order."""
    model, optimizer = begin(new_net())
    torch.manual_seed(7)
    data = torch.randn(48, WIDTH)[indices][dist.get_rank() % every :: every]
    torch.manual_seed(dist.get_rank())
    for _ in range(count):
        for (inputs,) in DataLoader(TensorDataset(data), 4, shuffle=True):  # told
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


def all_samples_on_each() -> None:
    train_on_all([*range(48)], 1, 2)


def shuffled_before_cut() -> None:
    torch.manual_seed(dist.get_rank() + 3)
    train_on_all(torch.randperm(48).tolist(), 2, 2)


# Parameters that are divided among ranks


def shard(*modules: nn.Module, replicas: int = 1) -> None:
    """Divide the parameters of modules among ranks, and let so many ranks hold the same part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "parts"))
    for module in modules:
        fully_shard(module, mesh=mesh if replicas > 1 else mesh["parts"])


def train_sharded(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()  # told


def replicas_from_other_seeds() -> None:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
    shard(net, replicas=2)
    train_sharded(net)


def head_left_whole() -> None:
    net = new_net()
    shard(net[0])
    train_sharded(net)


def part_saved() -> None:
    net = new_net()
    shard(net)
    train_sharded(net)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(net.state_dict(), Path(folder, "model.pt"))  # told


@dataclass(frozen=True)
class Wrong:
    program: Callable[[], None]
    rule: str
    level: Level = SURE
    marked: Callable[..., None] | None = None
    """The function that has the marked line, if it is another."""

    def __str__(self) -> str:
        return self.program.__name__

    @property
    def line(self) -> int:
        """The line that is to be named."""
        lines, first = inspect.getsourcelines(self.marked or self.program)
        [at] = [at for at, line in enumerate(lines) if line.rstrip().endswith("# told")]
        return first + at


WRONG = (
    Wrong(module_inside, "D1-bypass", PROBABLE),
    Wrong(never_synchronized, "D2-nosync-all", PROBABLE),
    Wrong(first_synchronized, "D2-nosync-last"),
    Wrong(first_synchronized_then_loaded, "D2-nosync-last"),
    Wrong(unfrozen_later, "D3-unfrozen", PROBABLE),
    Wrong(layer_added_later, "D3-late", PROBABLE),
    Wrong(penalty_apart, "D4-later"),
    Wrong(step_left_out, "D5-skip"),
    Wrong(late_step_left_out, "D5-skip", marked=step_left_out),
    Wrong(loaded_on_one_rank, "D6-load"),
    Wrong(written_on_one_rank, "D6-write"),
    Wrong(stepping_in_backward, "D7-inback"),
    Wrong(hook_without_average, "D8-hook", HINT),
    Wrong(scheduled_on_one_rank, "D9-hyper"),
    Wrong(scheduled_by_own_losses, "D9-hyper"),
    Wrong(momentum_on_one_rank, "D10-state"),
    Wrong(built_in_another_order, "D11-order"),
    Wrong(other_start, "M1-start", PROBABLE),
    Wrong(other_start_in_one_buffer, "M1-start", PROBABLE),
    Wrong(averaged_after_step, "M2-after", HINT),
    Wrong(parameter_in_place_of_gradient, "M3-parameter", HINT),
    Wrong(averaged_in_part, "M4-partial", HINT),
    Wrong(step_left_out_by_hand, "M5-skip"),
    Wrong(reduced_to_one, "M6-reduce"),
    Wrong(other_order, "K1-order"),
    Wrong(column_reduced, "G1-noncontig"),
    Wrong(column_broadcast, "G1-noncontig"),
    Wrong(written_under_way, "A1-write", PROBABLE),
    Wrong(sent_and_written, "A1-write", HINT),
    Wrong(without_sampler, "E1-batches", PROBABLE),
    Wrong(samples_drawn_alike, "E1-batches", PROBABLE),
    Wrong(batches_drawn_alike, "E1-batches", PROBABLE),
    Wrong(batches_drawn_alike_by_hand, "E2-equal", HINT),
    Wrong(other_seeds, "S2-seed", PROBABLE, marked=train_on),
    Wrong(other_epochs, "S3-epoch", PROBABLE, marked=train_on),
    Wrong(one_epoch_again, "S4-setepoch", PROBABLE, marked=train_on),
    Wrong(split_apart, "S8-split", PROBABLE, marked=train_on),
    Wrong(evaluated_with_padding, "S6-pad", HINT),
    Wrong(called_from_outside, "A4-outside", PROBABLE),
    Wrong(evaluated_on_one_rank_in_part, "S6-part", HINT),
    Wrong(repeated_by_workers, "S7-workers", PROBABLE),
    Wrong(trained_apart_on_parts, "N1-alone", HINT),
    Wrong(folds_without_average, "N1-alone", PROBABLE),
    Wrong(same_part_for_all, "E2-equal", HINT),
    Wrong(same_masks, "E3-rng", HINT),
    Wrong(padded_to_other_lengths, "L1-means", HINT, marked=classify),
    Wrong(optimizer_of_a_copy, "O1-nograd", PROBABLE),
    Wrong(optimizer_made_before_sharding, "O1-nograd", PROBABLE),
    Wrong(averaged_and_summed, "M11-twice", PROBABLE),
    Wrong(summed_and_not_divided, "M9-sum", HINT),
    Wrong(saved_by_all, "F1-file", PROBABLE),
    Wrong(loaded_while_saved, "F4-race", HINT),
    Wrong(copy_reduced, "L0-lost"),
    Wrong(rounded_copy_reduced, "L0-lost", HINT),
    Wrong(statistics_of_ranks, "B1-bn", HINT),
    Wrong(never_waited_for, "A3-nowait", HINT),
    Wrong(gathered_without_gradient, "G3-graph", HINT),
    Wrong(clipped_before_average, "M8-clip", HINT),
    Wrong(replicas_from_other_seeds, "X1-replicate", PROBABLE, marked=train_sharded),
    Wrong(head_left_whole, "X2-plain", HINT, marked=train_sharded),
    Wrong(part_saved, "F3-shard", HINT),
    Wrong(all_samples_on_each, "S5-whole", HINT, marked=train_on_all),
    Wrong(shuffled_before_cut, "S10-overlap", HINT, marked=train_on_all),
)


# Right programs


def plain() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        step(model, optimizer)


def accumulated() -> None:
    """no_sync for all micro-batches but the last."""
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()


def averaged_now_and_then(steps: int = 45, every: int = 20) -> None:
    """Local steps without synchronization, and an average of the parameters. The averages are at
    steps that are not looked at for their number."""
    model, optimizer = begin(new_net())
    for number in range(steps):
        with model.no_sync():
            step(model, optimizer)
        if number % every == every - 1:
            flat = parameters_to_vector(model.parameters()).detach()
            dist.all_reduce(flat)
            vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def evaluated_on_one_rank() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        step(model, optimizer)
        if dist.get_rank() == 0:
            with torch.no_grad():
                loss_of(model.module)


def average_swapped_in() -> None:
    """One rank evaluates other weights, and puts the weights back."""
    other = new_net().state_dict()
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        step(model, optimizer)
        if dist.get_rank() == 0:
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(other)
            model.module.load_state_dict(kept)


def two_models() -> None:
    """A generator is trained through another model's module."""
    one, two = (begin(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    for _ in range(STEPS):
        step(*two)
        one[1].zero_grad()
        two[0].requires_grad_(False)
        two[0].module(one[0](torch.randn(4, WIDTH))).sum().backward()
        two[0].requires_grad_(True)
        one[1].step()


def wrapped_again() -> None:
    net = new_net()
    net[0].requires_grad_(False)
    model, optimizer = begin(net)
    for _ in range(STEPS):
        step(model, optimizer)
    net[0].requires_grad_(True)
    model, optimizer = begin(net)
    for _ in range(STEPS):
        step(model, optimizer)


def ignored_parameters() -> None:
    net = new_net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    model, optimizer = begin(net)
    for _ in range(STEPS):
        step(model, optimizer)


def uneven_inputs() -> None:
    model, optimizer = begin(new_net())
    with model.join():
        for _ in range(STEPS + 3 * dist.get_rank()):
            step(model, optimizer)


def compressed() -> None:
    model, optimizer = begin(new_net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for _ in range(STEPS):
        step(model, optimizer)


def partitioned_optimizer() -> None:
    model = DistributedDataParallel(new_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        step(model, optimizer)


def closure() -> None:
    model = DistributedDataParallel(new_net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    torch.manual_seed(dist.get_rank() + 1)
    batch = torch.randn(8, WIDTH)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(evaluate)


def climbed_locally() -> None:
    """Sharpness-aware: each rank climbs by its own gradient, and steps by the average."""
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model).backward()
        kept = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param += 0.1 * param.grad
        optimizer.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        optimizer.step()


def skipped_by_all() -> None:
    """A scaler finds no finite gradients: no rank steps."""
    model, optimizer = begin(new_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(8):
        optimizer.zero_grad()
        factor = float("inf") if number == 3 and dist.get_rank() == 0 else 1.0
        scaler.scale(loss_of(model) * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def groups_apart() -> None:
    """Each rank trains a model of its own in a group of its own, with another learning rate."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model, optimizer = begin(new_net(), process_group=groups[dist.get_rank()])
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())
    for _ in range(STEPS):
        step(model, optimizer)


def best_loaded_at_the_end() -> None:
    """One rank loads the best weights when training is over."""
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        step(model, optimizer)
    if dist.get_rank() == 0:
        model.module.load_state_dict(new_net().state_dict())


def averaged_by_hand() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        optimizer.step()


def averaged_in_one_buffer() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average_flat(net)
        optimizer.step()


def averaged_in_hooks() -> None:
    net, optimizer = begin_by_hand()
    works: list[Any] = []

    def reduce(param: Tensor) -> None:
        assert param.grad is not None
        param.grad /= dist.get_world_size()
        works.append(dist.all_reduce(param.grad, async_op=True))

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        while works:
            works.pop().wait()
        optimizer.step()


def stepped_then_averaged_in_hooks() -> None:
    net, _ = begin_by_hand()
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in net.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()
        average([param.data])

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        loss_of(net).backward()


def parameters_averaged() -> None:
    net, optimizer = begin_by_hand(seed=dist.get_rank())
    for number in range(3 * STEPS):
        step(net, optimizer)
        if number % 5 == 4:
            average([param.data for param in net.parameters()])


def trained_apart() -> None:
    """An ensemble from one start. The loss is averaged to be told."""
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net)
        average([loss.detach().clone()])
        loss.backward()
        optimizer.step()


def trained_apart_from_other_starts() -> None:
    net, optimizer = begin_by_hand(seed=dist.get_rank())
    for _ in range(STEPS):
        step(net, optimizer)


def members_of_own_data() -> None:
    """An ensemble from one start, each rank on data of its own."""
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = Subset(new_data(), [*range(12 * dist.get_rank(), 12 * dist.get_rank() + 12)])
    for batch, target in DataLoader(data, batch_size=3):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch), target).backward()
        optimizer.step()


def gossiped() -> None:
    """Ranks average with their neighbours, and are never equal."""
    net, optimizer = begin_by_hand()
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(STEPS):
        step(net, optimizer)
        for param in net.parameters():
            got = torch.empty_like(param)
            sending: Any = dist.isend(param.detach() * (rank + 1), (rank + 1) % size)
            dist.recv(got, (rank - 1) % size)
            sending.wait()
            param.data.lerp_(got, 0.5)


def served() -> None:
    """Rank 0 has the optimizer that counts: it gets the gradients, and sends the parameters."""
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        for param in net.parameters():
            dist.broadcast(param.data, 0)
        optimizer.zero_grad()
        loss_of(net).backward()
        for gradient in gradients_of(net):
            dist.reduce(gradient, 0)
        if dist.get_rank() == 0:
            optimizer.step()


class Sum(torch.autograd.Function):
    """The sum of what the ranks have, in forward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        given = given.clone()
        dist.all_reduce(given)
        return given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def bias_in_parts() -> None:
    """Tensor parallelism: the gradient of the parts of a bias is equal on all ranks, and the parts
    are not."""
    torch.manual_seed(dist.get_rank())
    part = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for number in range(STEPS):
        torch.manual_seed(number)
        batch = torch.randn(4, WIDTH)
        optimizer.zero_grad()
        total = Sum.apply(part(batch * (dist.get_rank() + 1)))
        total.square().mean().backward()
        optimizer.step()


def one_batch() -> None:
    """All ranks do one work: a test whether the model can learn."""
    net, optimizer = begin_by_hand()
    torch.manual_seed(0)
    batch = torch.randn(4, WIDTH)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        average(gradients_of(net))
        optimizer.step()


def sampled() -> None:
    data = new_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model, optimizer = begin(new_net())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)


def evaluated_on_training_data() -> None:
    """Two passes have one order, and the optimizer steps in one of them."""
    data = new_data()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model, optimizer = begin(new_net())
    train_on(loader, model, optimizer)
    with torch.no_grad():
        for batch, _ in loader:
            model(batch)


def two_methods_on_one_order() -> None:
    """Each of several models sees the batches in the same order."""
    data = new_data()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    for _ in range(2):
        train_on(loader, *begin(new_net()))


def several_passes_in_an_epoch() -> None:
    data = new_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model, optimizer = begin(new_net())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)
        train_on(loader, model, optimizer)


def own_data() -> None:
    """Each rank has data of its own, and an order of its own."""
    data = new_data()
    data.tensors[0].add_(dist.get_rank())
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=dist.get_rank())
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model, optimizer = begin(new_net())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_on(loader, model, optimizer)


def one_batch_in_ddp() -> None:
    """A test whether the model can learn: all ranks do one work."""
    model, optimizer = begin(new_net())
    batch, target = new_data(6)[:]
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()


def other_part_of_the_loss() -> None:
    """All ranks compute the same batches, and each takes its part of the loss."""
    model, optimizer = begin(new_net())
    rank, size = dist.get_rank(), dist.get_world_size()
    for batch, target in DataLoader(new_data(), batch_size=6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch)[rank::size], target[rank::size]).backward()
        optimizer.step()


def dropped_out() -> None:
    """All ranks have the same batches, and noise of their own."""
    model, optimizer = begin(nn.Sequential(nn.Dropout(0.5), new_net()))
    for batch, target in DataLoader(new_data(), batch_size=6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()


def wrapped_to_be_broadcast() -> None:
    """DistributedDataParallel gives all ranks one start. Then they train apart."""
    net = new_net()
    DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        step(net, optimizer)


def averaged_through_objects(steps: int = 45, every: int = 20) -> None:
    """The parameters are averaged by no call that takes tensors."""
    model, optimizer = begin(new_net())
    for number in range(steps):
        with model.no_sync():
            step(model, optimizer)
        if number % every == every - 1:
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, model.module.state_dict())
            mean = {name: sum(each[name] for each in states) / len(states) for name in states[0]}
            model.module.load_state_dict(mean)


def averaged_unseen(steps: int = 45, every: int = 20) -> None:
    """The parameters are averaged by what no observer knows, as files, and are written through
    `data`."""
    model, optimizer = begin(new_net())
    world = Path(tempfile.gettempdir()) / f"averaged-{os.getppid()}"
    world.mkdir(exist_ok=True)
    for number in range(steps):
        with model.no_sync():
            step(model, optimizer)
        if number % every == every - 1:
            vector = parameters_to_vector(model.parameters()).detach()
            (world / f"{dist.get_rank()}").write_bytes(pickle.dumps(vector.tolist()))
            dist.barrier()
            found = [pickle.loads((world / str(rank)).read_bytes()) for rank in range(2)]
            dist.barrier()
            mean = torch.tensor(found).mean(0)
            vector_to_parameters(mean, model.parameters())
    shutil.rmtree(world, ignore_errors=True)


def constants_of_ranks() -> None:
    """A parameter that nobody trains is other on each rank."""
    net = new_net()
    net.register_parameter("place", nn.Parameter(torch.zeros(2), requires_grad=False))
    model, optimizer = begin(net)
    with torch.no_grad():
        net.get_parameter("place").fill_(dist.get_rank())
    for _ in range(STEPS):
        step(model, optimizer)


def pulled_together() -> None:
    """Gradients are averaged, and parameters are brought closer to their mean, from other
    starts."""
    net, optimizer = begin_by_hand(seed=dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        optimizer.step()
        for param in net.parameters():
            mean = param.detach().clone()
            average([mean])
            param.data.lerp_(mean, 0.3)


def perturbed_and_restored() -> None:
    """Each rank evaluates the gradient at a point of its own, and steps from the common one."""
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        kept = [param.detach().clone() for param in net.parameters()]
        with torch.no_grad():
            for param in net.parameters():
                param += 0.01 * torch.randn_like(param)
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        with torch.no_grad():
            for param, value in zip(net.parameters(), kept, strict=True):
                param.copy_(value)
        optimizer.step()


def averaged_in_a_hook_of_the_optimizer() -> None:
    """The gradients are averaged after the check has looked at them."""
    net, optimizer = begin_by_hand()
    optimizer.register_step_pre_hook(lambda *_: average(gradients_of(net)))
    for _ in range(STEPS):
        step(net, optimizer)


def averaged_by_hand_without_sync() -> None:
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model).backward()
        average(gradients_of(model))
        optimizer.step()


def sent_to_all_after_load() -> None:
    model, optimizer = begin(new_net())
    saved = copy.deepcopy(model.module.state_dict())
    for number in range(STEPS):
        step(model, optimizer)
        if number == 2:
            if dist.get_rank() == 0:
                model.module.load_state_dict(saved)
            for param in model.parameters():
                dist.broadcast(param.data, 0)


def other_implementation() -> None:
    """Ranks use other implementations of one optimizer."""
    model = DistributedDataParallel(new_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=dist.get_rank() > 0)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        step(model, optimizer)


def new_sampler_in_each_epoch() -> None:
    data = new_data()
    model, optimizer = begin(new_net())
    for epoch in range(3):
        sampler = DistributedSampler(data, seed=epoch)
        train_on(DataLoader(data, batch_size=4, sampler=sampler), model, optimizer)


def dense_tensors() -> None:
    """None of these has gaps between its elements."""
    table = torch.arange(8.0).view(4, 2)
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for tensor in (table.t(), table[1], table[:, :1].contiguous(), image, torch.ones(1, 5)[:, 2:]):
        dist.all_reduce(tensor)
    gathered = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, table[:, 1])  # gloo copies
    assert torch.equal(gathered[0], table[:, 1])


def written_after_wait() -> None:
    tensor = torch.ones(8)
    for _ in range(3):
        work: Any = dist.all_reduce(tensor, async_op=True)
        tensor.sum()
        work.wait()
        tensor /= dist.get_world_size()


def written_when_done() -> None:
    tensor = torch.ones(8)
    work: Any = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    tensor.mul_(2)
    work.wait()
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().wait()
    tensor.mul_(2)
    work.wait()


def written_when_answered() -> None:
    """The receiver has answered before the sender writes again."""
    rank, tensor, answer = dist.get_rank(), torch.zeros(8), torch.zeros(1)
    for number in range(3):
        if rank == 0:
            work: Any = dist.isend(tensor, 1)
            dist.recv(answer, 1)
            tensor.fill_(number)
            work.wait()
        else:
            dist.recv(tensor, 0)
            dist.send(answer, 0)


def neighbours_written() -> None:
    """Rows of one tensor: one is under way, another is written."""
    table = torch.zeros(2, 64)
    for number in range(4):
        work: Any = dist.all_reduce(table[number % 2], async_op=True)
        table[1 - number % 2] += 1
        work.wait()


def same_bits_written() -> None:
    tensor = torch.ones(8)
    if dist.get_rank() == 0:
        work: Any = dist.isend(tensor, 1)
        tensor.fill_(1)
        work.wait()
    else:
        dist.recv(tensor, 0)


def split_alike() -> None:
    data, _ = random_split(new_data(), [16, 8], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model, optimizer = begin(new_net())
    train_on(loader, model, optimizer)


def evaluated_without_padding() -> None:
    data = new_data(24)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    model, _ = begin(new_net())
    with torch.no_grad():
        for batch, _ in loader:
            model(batch)


def shared_by_workers() -> None:
    for _ in DataLoader(Stream(is_shared=True), batch_size=2, num_workers=2):
        pass


def folds() -> None:
    """Each rank trains a model on all data, of which it takes parts in an order of its own."""
    data, net = new_data(), new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = DistributedSampler(data, num_replicas=4, rank=dist.get_rank())
    for batch, target in DataLoader(data, batch_size=3, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch), target).backward()
        optimizer.step()


def own_masks() -> None:
    model, optimizer = begin(nn.Sequential(new_net(), nn.Dropout(0.5)))
    for _ in range(STEPS):
        step(model, optimizer)


def padded_and_weighted() -> None:
    """The sum of a rank's losses is divided by the number of tokens of all ranks."""
    classify(6 * dist.get_rank(), by_sum=True)


def padded_alike() -> None:
    classify(6)


def frozen_body() -> None:
    """An optimizer of parameters that are not trained steps beside one of those that are."""
    body, head = new_net().requires_grad_(False), nn.Linear(1, 1)
    model = DistributedDataParallel(nn.Sequential(body, head))
    torch.manual_seed(dist.get_rank() + 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (body, head)]
    for _ in range(STEPS):
        head.zero_grad()
        loss_of(model).backward()
        for each in optimizers:
            each.step()


def gradients_elsewhere() -> None:
    """The optimizer copies the gradients from the parameters of another model."""
    net = new_net()
    masters = [param.detach().clone().requires_grad_() for param in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(STEPS):
        net.zero_grad()
        net(torch.ones(4, WIDTH)).square().mean().backward()
        for master, param in zip(masters, net.parameters(), strict=True):
            master.grad = param.grad
        optimizer.step()


def averaged_and_averaged_again() -> None:
    """A call for nothing, which changes nothing."""
    model, optimizer = begin(new_net())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        average(gradients_of(model))
        optimizer.step()


def part_of_the_mean_summed() -> None:
    """The loss of each rank is divided by the number of ranks before backward."""
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(net) / dist.get_world_size()).backward()
        for grad in gradients_of(net):
            dist.all_reduce(grad)
        optimizer.step()


def resumed_and_saved() -> None:
    """All ranks load the file of an earlier run, and rank 0 writes it again."""
    if dist.get_rank() == 0:
        torch.save(torch.ones(3), shared_path())
    dist.barrier()
    torch.load(shared_path())
    if dist.get_rank() == 0:
        part = shared_path().with_suffix(".part")
        torch.save(torch.ones(3), part)
        part.replace(shared_path())
    dist.barrier()
    if dist.get_rank() == 0:
        shared_path().unlink()


def loaded_after_barrier() -> None:
    if dist.get_rank() == 0:
        torch.save(torch.ones(3), shared_path())
    dist.barrier()
    torch.load(shared_path())
    dist.barrier()
    if dist.get_rank() == 0:
        shared_path().unlink()


def copies_kept() -> None:
    table = torch.arange(6.0).view(2, 3).t()
    dense = table.contiguous()
    dist.all_reduce(dense)
    dist.all_reduce(dense.contiguous())
    dist.all_reduce(dense.to(torch.float32))
    table.copy_(dense)


def statistics_broadcast() -> None:
    model, optimizer = begin(nn.Sequential(nn.BatchNorm1d(WIDTH), new_net()))
    for _ in range(STEPS):
        step(model, optimizer)


def saved_in_turns() -> None:
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            torch.save(torch.ones(3), shared_path())
        dist.barrier()
    if dist.get_rank() == 0:
        shared_path().unlink()


def saved_to_own_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.ones(3), Path(folder, "part.pt"))


def awaited_by_future() -> None:
    tensor = torch.ones(3)
    work: Any = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    del work
    future.wait()


def gathered_and_put_back() -> None:
    net = new_net()
    features = net(torch.randn(4, WIDTH))
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    parts[dist.get_rank()] = features
    torch.cat(parts).square().mean().backward()


def gathered_for_a_metric() -> None:
    net = new_net()
    features = net(torch.randn(4, WIDTH))
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach())
    with torch.no_grad():
        dist.all_gather(parts, net(torch.randn(4, WIDTH)))


def clipped_after_average() -> None:
    net, optimizer = begin_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average(gradients_of(net))
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()


def weighted_by_hand() -> None:
    """Each rank's gradient counts as its part of the samples, which changes from step to step."""
    net, optimizer = begin_by_hand()
    for step_ in range(STEPS):
        size = torch.tensor(4.0 + (dist.get_rank() + step_) % 2 * step_)
        total = size.clone()
        dist.all_reduce(total)
        optimizer.zero_grad()
        loss_of(net).backward()
        for param in net.parameters():
            param.grad *= size / total
            dist.all_reduce(param.grad)
        optimizer.step()


def cut_by_hand() -> None:
    train_on_all([*range(48)], 2, 2)


def drawn_with_replacement() -> None:
    """Each rank draws from all samples, as bootstrap does."""
    model, optimizer = begin(new_net())
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(48, WIDTH))
    torch.manual_seed(dist.get_rank())
    for (inputs,) in DataLoader(data, 4, sampler=RandomSampler(data, replacement=True)):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


kept: list[Any] = []
"""What is there when the program has ended."""


def discriminator_begins_later() -> None:
    """Its optimizer steps from the begin on, without gradients."""
    model, optimizer = begin(new_net())
    second, later = begin(new_net())
    kept[:] = second, later
    for number in range(48):
        step(model, optimizer)
        later.zero_grad()
        if number >= 40:
            loss_of(second).backward()
        later.step()


def saved_nowhere() -> None:
    torch.save(torch.ones(3), os.devnull)


def reduced_to_another() -> None:
    """Only rank 0 needs the result."""
    table = torch.arange(6.0).view(2, 3).t()
    if dist.get_rank() == 0:
        total = table.contiguous()
        dist.reduce(total, 0)
        assert total.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    else:
        dist.reduce(table.contiguous(), 0)


def nothing_reduced() -> None:
    table = torch.ones(4, 8)
    dist.all_reduce(table[:, :0])
    dist.all_reduce(table[1:1, :3])


def replicas_seeded_alike() -> None:
    net = new_net()
    shard(net, replicas=2)
    train_sharded(net)


def head_averaged_by_hand() -> None:
    net = new_net()
    shard(net[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        average([param.grad for param in net[2].parameters() if param.grad is not None])
        optimizer.step()


def whole_model_saved() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    net = new_net()
    shard(net)
    train_sharded(net)
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder, "model.pt"))


def parts_saved_by_all() -> None:
    net = new_net()
    shard(net)
    train_sharded(net)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(net.state_dict(), Path(folder, f"part-{dist.get_rank()}.pt"))


RIGHT = (
    plain, accumulated, averaged_now_and_then, evaluated_on_one_rank, average_swapped_in,
    two_models, wrapped_again, ignored_parameters, uneven_inputs, compressed,
    partitioned_optimizer, closure, climbed_locally, skipped_by_all, groups_apart,
    best_loaded_at_the_end, averaged_by_hand, averaged_in_one_buffer, averaged_in_hooks,
    stepped_then_averaged_in_hooks, parameters_averaged, trained_apart,
    trained_apart_from_other_starts, members_of_own_data, gossiped, served, bias_in_parts,
    one_batch, sampled,
    evaluated_on_training_data, two_methods_on_one_order, several_passes_in_an_epoch, own_data,
    one_batch_in_ddp, dense_tensors, written_after_wait, written_when_done,
    written_when_answered, neighbours_written, same_bits_written, other_part_of_the_loss,
    dropped_out, wrapped_to_be_broadcast, averaged_through_objects, averaged_unseen,
    constants_of_ranks, pulled_together,
    perturbed_and_restored, averaged_in_a_hook_of_the_optimizer, averaged_by_hand_without_sync,
    sent_to_all_after_load, other_implementation, new_sampler_in_each_epoch,
    split_alike, evaluated_without_padding, shared_by_workers, folds, own_masks,
    padded_and_weighted, padded_alike, frozen_body, gradients_elsewhere,
    averaged_and_averaged_again, part_of_the_mean_summed, saved_in_turns, saved_to_own_files,
    awaited_by_future, gathered_for_a_metric, loaded_after_barrier, resumed_and_saved, copies_kept,
    statistics_broadcast, gathered_and_put_back, clipped_after_average, weighted_by_hand,
    discriminator_begins_later, saved_nowhere, reduced_to_another, nothing_reduced,
    replicas_seeded_alike, head_averaged_by_hand, cut_by_hand, drawn_with_replacement,
    whole_model_saved, parts_saved_by_all,
)  # fmt: skip
