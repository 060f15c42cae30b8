"""Functions that ranks run for figures that no lesson's run shows: small, and the same every time
but for speed."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.lessons.all_reduce import lesson as allreduce
from playground.lessons.bert.lesson import CLASSES, BertConfig, Model
from playground.lessons.collectives import lesson as collectives
from playground.lessons.data_parallel.experiment import track_step
from playground.lessons.data_parallel.losses import LOSSES, new_model_and_batch, new_optimizer
from playground.lessons.data_parallel.machine import (
    parallel_apply,
    replicate,
    resolve_devices,
    scatter,
)
from playground.lessons.data_parallel.page import WAYS, DataParallelSettings
from playground.lessons.gpt import GPT, make_batch
from playground.lessons.hello import lesson as hello
from playground.lessons.ladder import lesson as ladder
from playground.lessons.mnist import Net
from playground.lessons.parameter_server.experiment import (
    MeasuredServer,
    new_model as new_served_model,
    new_worker,
)
from playground.lessons.parameter_server.lesson import SERVER, serve, work
from playground.lessons.parameter_server.page import ServerSettings
from playground.lessons.rpc.agent import Agent
from playground.lessons.sgd.lesson import average_gradients
from playground.lessons.tensor.lesson import ColumnParallelLinear, RowParallelLinear, copy_to_region
from playground.runtime import device
from playground.training.replicas import broadcast_parameters, find_largest_difference
from playground.training.step import mean_loss_part

SEED, LR, BATCH = 1234, 0.1, 24
VOCABULARY, TOKENS = 59, 32
"""Number of words, and length of a pair, of the sentence pairs that the lesson bert generates."""
SIX = ("scatter", "gather", "reduce", "all_reduce", "broadcast", "all_gather")
"""The collectives that every tutorial has."""


@dataclass(frozen=True)
class Held:
    """Numbers that a rank holds."""

    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Met:
    """What a rank says of itself."""

    rank: int
    pid: int
    heard_from: tuple[int, ...]


def meet(rank: int, size: int) -> Met:
    """Say who this rank is, and whose rank it has got, as the lesson hello does."""
    return Met(rank, os.getpid(), tuple(hello.gather(size, rank)))


def six_collectives(rank: int, size: int) -> dict[str, Held]:
    """Run each of `SIX` as the lesson does: rank r has r + 1, but the root of scatter a list."""
    before: dict[str, tuple[float, ...]] = dict.fromkeys(SIX, (rank + 1.0,))
    before["scatter"] = tuple(other + 1.0 for other in range(size)) if rank == 0 else ()
    return {name: Held(before[name], tuple(getattr(collectives, name)(rank, size))) for name in SIX}


def reduce_scatter(rank: int, size: int) -> Held:
    """Run it as the lesson does: rank r has r + 1 times 1, 2, …"""
    before = tuple((rank + 1.0) * (other + 1) for other in range(size))
    return Held(before, tuple(collectives.reduce_scatter(rank, size)))


def sharded_mlp(rank: int, size: int) -> dict[str, tuple[float, ...]]:
    """One token through an MLP that is sharded over the ranks, and back from a gradient of ones."""
    features = 2 * size
    up, down = (nn.Linear(*shape, bias=False) for shape in ((2, features), (features, 2)))
    for linear in (up, down):
        numbers = torch.arange(linear.weight.numel(), dtype=torch.float32).view_as(linear.weight)
        linear.weight.data = numbers % 5 - 1
    down.register_parameter("bias", nn.Parameter(torch.zeros(2)))
    column = ColumnParallelLinear(up, None).to(device())
    row = RowParallelLinear(down, None).to(device())
    token = torch.tensor([[2.0, 1.0]], device=device(), requires_grad=True)
    entered = copy_to_region(token)
    entered.retain_grad()
    hidden = torch.relu(column(entered))
    summand = F.linear(hidden, row.weight)
    output = row(hidden)
    output.backward(torch.ones_like(output))
    found = {"token": token, "hidden": hidden, "summand": summand, "output": output}
    found |= {"own": entered.grad, "gradient": token.grad}
    return {name: tuple(each.detach().flatten().tolist()) for name, each in found.items()}


def all_reduce(rank: int, size: int, name: str) -> Held:
    """An all-reduce of the lesson's; rank r has 2r + 1 in as many elements as there are ranks."""
    return held_around(getattr(allreduce, name.replace("-", "_")), rank, size)


def our_ring(rank: int, size: int) -> Held:
    """The same by the ring of our algorithms, whose phases and additions are recorded, too."""
    return held_around(load_all_reduce("ring"), rank, size)


def held_around(call: Callable[[torch.Tensor], object], rank: int, size: int) -> Held:
    tensor = torch.full((size,), 2.0 * rank + 1, device=device())
    before = tensor.tolist()
    dist.barrier()
    call(tensor)
    return Held(tuple(before), tuple(tensor.tolist()))


def send_a_number(rank: int, size: int) -> Held:
    """Rank 0 sends a number to rank 1; the other ranks have no part in it."""
    tensor = torch.full((1,), float(rank == 0), device=device())
    before = tensor.tolist()
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    return Held(tuple(before), tuple(tensor.tolist()))


@dataclass(frozen=True, kw_only=True)
class SgdStep:
    """One step of SGD, seen at one weight of the model."""

    weight: float
    gradient: float
    """On this rank."""
    average: float
    """The gradient averaged over all ranks."""
    new_weight: float
    lr: float
    samples: int
    """Number of this rank's samples."""
    parameters: int
    """Number of the model's parameters."""
    difference: float
    """Largest absolute difference of any parameter to rank 0's, after the step."""


def sgd_step(rank: int, size: int) -> SgdStep:
    """One step as the lesson sgd takes it, on random images, a part of the batch on each rank."""
    model, inputs, labels = new_net(rank, size)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    param = next(model.parameters())

    def first(tensor: torch.Tensor) -> float:
        return tensor.flatten()[0].item()

    weight = first(param)
    optimizer.zero_grad()
    mean_loss_part(model(inputs), labels, BATCH / size).backward()
    gradient = first(param.grad)
    average_gradients(model)
    average = first(param.grad)
    optimizer.step()
    return SgdStep(
        weight=weight,
        gradient=gradient,
        average=average,
        new_weight=first(param),
        lr=LR,
        samples=len(inputs),
        parameters=sum(each.numel() for each in model.parameters()),
        difference=find_largest_difference(model)[0],
    )


def new_net(rank: int, size: int, batch: int = BATCH) -> tuple[Net, torch.Tensor, torch.Tensor]:
    """A new `Net`, and this rank's part of a batch of random images and labels."""
    torch.manual_seed(SEED)
    model = Net().to(device())
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
    return (
        model,
        images.tensor_split(size)[rank].to(device()),
        labels.tensor_split(size)[rank].to(device()),
    )


def rung_steps(rank: int, size: int, rung: str, batch: int = 128, steps: int = 4) -> None:
    """Steps of a rung of the lesson ladder."""
    net, inputs, labels = new_net(rank, size, batch)
    model, after_backward = getattr(ladder, rung)(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        dist.barrier()
        optimizer.zero_grad()
        F.nll_loss(model(inputs), labels).backward()
        for call in after_backward:
            call()
        optimizer.step()


def bert_steps(rank: int, size: int, steps: int = 4) -> None:
    """Steps of the lesson's encoder by DistributedDataParallel, on random pairs, with about four
    buckets."""
    torch.manual_seed(SEED)
    model = Model(BertConfig(vocabulary=VOCABULARY)).to(device())
    quarter = sum(param.numel() for param in model.parameters()) / 2**20  # of 4 bytes each
    ddp = DistributedDataParallel(model, bucket_cap_mb=quarter)
    optimizer = torch.optim.Adam(ddp.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=device())
    labels = torch.randint(CLASSES, (BATCH,), device=device())
    for _ in range(steps):
        dist.barrier()
        optimizer.zero_grad()
        logits = ddp(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
        F.cross_entropy(logits, labels).backward()
        optimizer.step()


def ddp_backward(rank: int, size: int, model_name: str) -> None:
    """Backward passes of DistributedDataParallel with small buckets: of `Net` or, "four", of a
    model of four parameters."""
    if model_name == "four":
        torch.manual_seed(SEED)
        layers = OrderedDict(first=nn.Linear(64, 64), relu=nn.ReLU(), second=nn.Linear(64, 64))
        model: nn.Module = nn.Sequential(layers).to(device())
        inputs, cap = torch.randn(8, 64, device=device()), layers["first"].weight.nbytes
    else:
        model, inputs, _ = new_net(rank, size, 256)
        cap = 52_428
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)
    for _ in range(3):  # after the first, DDP rearranges its buckets
        dist.barrier()
        ddp(inputs).square().mean().backward()


@dataclass(frozen=True, kw_only=True)
class DataParallelStep:
    """The shapes of what a step of DataParallel moves."""

    gather: str
    """The way to the loss, named after what is gathered."""
    batch: tuple[int, ...]
    chunks: Sequence[tuple[int, ...]]
    """Each device's part of the batch."""
    outputs: Sequence[tuple[int, ...]]
    """Its logits."""


def data_parallel_steps(
    rank: int, size: int, settings: DataParallelSettings
) -> list[DataParallelStep]:
    """A step of DataParallel by each way to the loss, with its memory accounted for by device."""
    devices = resolve_devices(settings.devices)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    for way in WAYS:
        loss = partial(LOSSES[way], model, (tokens, targets), devices, devices[0])
        track_step(model, new_optimizer(model), loss, devices)
    chunks = scatter((tokens,), devices)
    outputs = parallel_apply(replicate(model, devices), chunks, None, devices)
    return [
        DataParallelStep(
            gather=way,
            batch=tuple(tokens.shape),
            chunks=[tuple(each.shape) for (each,) in chunks],
            outputs=[tuple(each.shape) for each in outputs],
        )
        for way in WAYS
    ]


class TimedAgent(Agent):
    """Takes the time of each call: (start, end), in seconds from the last barrier on."""

    def __init__(self) -> None:
        self.began, self.spans = time.perf_counter(), list[tuple[float, float]]()
        super().__init__()

    def barrier(self) -> None:
        super().barrier()
        self.began, self.spans = time.perf_counter(), list[tuple[float, float]]()

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter() - self.began
        result = super().call(rank, function, *args)
        self.spans.append((start, time.perf_counter() - self.began))
        return result


def server_modes(rank: int, size: int, settings: ServerSettings) -> list[list[tuple[float, float]]]:
    """A training with a parameter server in each mode. Returns when this worker waited for the
    server; rank 0 is it."""
    workers = dist.new_group(list(range(1, size)))
    new_served_model(settings)(torch.zeros(1, 1, 28, 28)).sum().backward()  # the first takes longer
    waits = []
    with TimedAgent() as agent:
        for mode in settings.modes:
            if rank == SERVER:
                serve(agent, MeasuredServer(new_served_model(settings), mode, size - 1, settings))
            else:
                work(agent, rank - 1, new_worker(settings, workers))
            waits.append(agent.spans.copy())  # the next barrier is a call
    return waits


def zero_stages(rank: int, size: int) -> None:
    """A step of each method of zero, without the library's."""
    # in the rank: what fully_shard imports leaves a message at the end of a process forked after it
    from playground.lessons.zero import lesson as zero

    for train in (zero.data_parallel, zero.zero1, zero.zero2, zero.zero3):
        torch.manual_seed(SEED)
        train(GPT(), [make_batch(1, seed=rank)])  # type: ignore[no-untyped-call]


def scaling_steps(rank: int, size: int) -> None:
    """Two steps of scaling. In the second, rank 1 is late."""
    # in the rank: its counter of operations imports much that no other run needs
    from playground.lessons.scaling import lesson as scaling

    torch.manual_seed(SEED)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = make_batch(size, seed=SEED).chunk(size)[rank]
    for late in (False, True):
        if late and rank == 1:
            time.sleep(0.05)
        scaling.train_step(model, optimizer, part, float("inf"))
