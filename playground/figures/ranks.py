"""Functions that ranks run for figures that no lesson's run shows: small, and the same every time
but for speed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.base.files import temporary_folder
from playground.lessons.all_reduce import lesson as allreduce
from playground.lessons.bert import lesson as bert
from playground.lessons.collectives import lesson as collectives
from playground.lessons.data_parallel import lesson as data_parallel
from playground.lessons.devices import KINDS, Memory, find_devices, track_memory
from playground.lessons.elastic import lesson as elastic
from playground.lessons.experts import lesson as experts
from playground.lessons.gpt import GPT, Block, C, T, V, make_batch
from playground.lessons.hello import lesson as hello
from playground.lessons.ladder import lesson as ladder
from playground.lessons.mnist import Net
from playground.lessons.parameter_server import lesson as parameter_server
from playground.lessons.rpc import lesson as rpc
from playground.lessons.sgd.lesson import average_gradients
from playground.training.prepare import DATA_DIR
from playground.training.replicas import broadcast_parameters, find_largest_difference
from playground.training.step import mean_loss_part
from playground.world import device, report, restart_count

SEED, LR, BATCH = 1234, 0.1, 24
SIX = ("scatter", "gather", "reduce", "all_reduce", "broadcast", "all_gather")
"""The collectives that every tutorial has."""


@dataclass(frozen=True)
class Held:
    """Numbers that a rank holds."""

    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class MeshGroup:
    """A group that a rank is in, and the bytes that it sends to it."""

    ranks: list[int]
    sent: int


@dataclass(frozen=True)
class MeshPlace:
    """A rank's coordinates, and its groups by the names of their axes."""

    coordinates: dict[str, int]
    groups: dict[str, MeshGroup]


@dataclass(frozen=True)
class Met:
    """What a rank says of itself."""

    rank: int
    pid: int
    heard_from: tuple[int, ...]


def meet(rank: int, size: int) -> Met:
    """Say who this rank is, and whose rank it has got, as the lesson hello does."""
    return Met(rank, os.getpid(), tuple(hello.gather_by_torch(size, rank)))


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
    """The chapter's token through an MLP without a nonlinear function, which is sharded over two
    ranks, and back from a gradient of 1."""
    # not in the server that forks ranks: what it imports there takes seconds
    from playground.lessons.tensor.lesson import column_parallel, f, g, row_parallel

    up, down = nn.Linear(1, size, device=device()), nn.Linear(size, 1, device=device())
    for linear, numbers in ((up, (2.0, 3.0)), (down, (5.0, 7.0))):
        weights = torch.tensor(numbers, device=device())
        linear.weight.data = weights.view_as(linear.weight)
        linear.bias.data.zero_()
    column_parallel(up)
    row_parallel(down)
    token = torch.tensor([[4.0]], device=device(), requires_grad=True)
    entered = f(token)
    entered.retain_grad()
    hidden = up(entered)
    summand = down(hidden)
    output = g(summand)
    output.backward(torch.ones_like(output))
    found = {"token": token, "hidden": hidden, "summand": summand, "output": output}
    found |= {"own": entered.grad, "gradient": token.grad}
    return {name: tuple(each.detach().flatten().tolist()) for name, each in found.items()}


def all_reduce(rank: int, size: int, name: str) -> Held:
    """An all-reduce of the lesson's; rank r has 10 to the power r, an element for each rank."""
    return held_around(getattr(allreduce, name.replace("-", "_")), rank, size)


def our_ring(rank: int, size: int) -> Held:
    """The same by the ring of our algorithms, whose phases and additions are recorded, too."""
    return held_around(load_all_reduce("ring"), rank, size)


def held_around(call: Callable[[torch.Tensor], object], rank: int, size: int) -> Held:
    tensor = torch.full((size,), 10.0**rank, device=device())
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
    """Steps of the program's encoder by DistributedDataParallel, with about four buckets."""
    torch.manual_seed(SEED)
    model = bert.Encoder().to(device())
    quarter = sum(param.numel() for param in model.parameters()) / 2**20  # of 4 bytes each
    ddp = DistributedDataParallel(model, bucket_cap_mb=quarter)
    optimizer = torch.optim.Adam(ddp.parameters(), fused=True)
    tokens, labels = (tensor.to(device()) for tensor in bert.make_batch())
    for _ in range(steps):
        dist.barrier()
        optimizer.zero_grad()
        F.cross_entropy(ddp(tokens), labels).backward()
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


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "logits": data_parallel.gather_logits,
    "loss": data_parallel.gather_losses,
    "outputs": data_parallel.keep_outputs,
}
"""Ways to the loss, named after what is gathered, or is not."""


@dataclass(frozen=True, kw_only=True)
class DataParallelStep:
    """The shapes of what a step of DataParallel moves."""

    gather: str
    """One of `LOSSES`."""
    batch: tuple[int, ...]
    chunks: Sequence[tuple[int, ...]]
    """Each device's part of the batch."""
    outputs: Sequence[tuple[int, ...]]
    """Its logits."""


def step_on_devices(gather: str, devices: Sequence[torch.device]) -> Memory:
    """A step of the program data-parallel. Returns what the devices held and copied in it."""
    with track_memory(devices) as memory:
        model = data_parallel.make_model(devices[0])
        optimizer = torch.optim.SGD(model.parameters(), LR)
        loss = LOSSES[gather](model, *new_text(), devices)
        memory.kind = "gradients"
        loss.backward()
        optimizer.step()
    return memory


def new_text() -> list[torch.Tensor]:
    """Tokens, and as targets the same tokens."""
    return [torch.randint(data_parallel.WORDS, (BATCH, data_parallel.LENGTH))] * 2


def data_parallel_steps(rank: int, size: int) -> list[DataParallelStep]:
    """A step of DataParallel by each way to the loss, on four devices."""
    devices = find_devices(data_parallel.DEVICES)
    for gather in LOSSES:
        step_on_devices(gather, devices)
    tokens, _ = new_text()
    model = data_parallel.make_model(devices[0])
    chunks = [tuple(chunk.shape) for chunk in tokens.chunk(len(devices))]
    outputs = [tuple(model(torch.zeros(shape, dtype=torch.int64)).shape) for shape in chunks]
    batch = tuple(tokens.shape)
    return [
        DataParallelStep(gather=gather, batch=batch, chunks=chunks, outputs=outputs)
        for gather in LOSSES
    ]


def remote_call(rank: int, size: int) -> dict[str, float]:
    """A call from each rank to the rank on its right."""
    agent: Any = rpc.Agent(rank, size)
    after = agent.call((rank + 1) % size, rpc.add_ten_times_rank, float(rank))
    agent.shut_down()
    return {"before": float(rank), "after": after}


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """A device in a step of DataParallel."""

    at_peak: dict[str, int]
    """What it holds when it holds the most: bytes by kind."""
    share: float
    """The share of the step in which it computes, 0 to 1."""

    @property
    def peak(self) -> int:
        """The most bytes that it holds."""
        return sum(self.at_peak.values())


def data_parallel_memory(rank: int, size: int) -> dict[str, list[DeviceLoad]]:
    """The load of each device in a step by each way to the loss."""
    devices = find_devices(data_parallel.DEVICES)
    return {gather: loads_of(gather, devices) for gather in LOSSES}


def loads_of(gather: str, devices: Sequence[torch.device]) -> list[DeviceLoad]:
    """The load of each device in a step by this way to the loss."""
    step_on_devices(gather, devices)  # the first takes longer
    start = time.perf_counter()
    memory = step_on_devices(gather, devices)
    seconds = time.perf_counter() - start
    loads = []
    for each in devices:
        held = memory.at_peak[each]
        at_peak = {kind: held[kind] for kind in KINDS if held[kind]}
        loads.append(DeviceLoad(at_peak=at_peak, share=memory.busy[each] / seconds))
    return loads


SERVER_MODES: tuple[Callable[[Any], None], ...] = (
    parameter_server.synchronous,
    parameter_server.asynchronous,
    parameter_server.bounded,
)
Points = list[tuple[float, float]]


def run_mode(mode: Callable[[Any], None], rank: int, size: int, group: Any) -> Any:
    """A training with a parameter server. Returns the server on rank 0, None on a worker."""
    if rank > 0:
        return parameter_server.work(rank, size, group)
    server: Any = parameter_server.Server(size, group)
    mode(server)
    server.stop()
    return server


def server_modes(
    rank: int, size: int, steps: int, slower: int, ahead: int
) -> dict[str, tuple[Points, float]]:
    """A training with a parameter server in each mode. Returns when this rank computed a gradient,
    (start, end), and when the training ended, in seconds from its start on."""
    vars(parameter_server).update(STEPS=steps, SLOWER=slower, AHEAD=ahead)
    group, spans = dist.new_group(), Points()
    compute: Any = parameter_server.compute_gradient

    def compute_and_note(*args: Any) -> Any:
        start = time.perf_counter() - began
        gradient = compute(*args)
        spans.append((start, time.perf_counter() - began))
        return gradient

    vars(parameter_server).update(compute_gradient=compute_and_note)
    found = {}
    for mode in SERVER_MODES:
        dist.barrier(group)
        began = time.perf_counter()
        run_mode(mode, rank, size, group)
        found[mode.__name__] = spans.copy(), time.perf_counter() - began
        spans.clear()
    return found


def server_losses(rank: int, size: int) -> dict[str, Points]:
    """The loss over time, (seconds, loss), of a training without a server and of each mode of one.
    Rank 0 returns them."""
    torch.set_default_dtype(torch.float64)
    group = dist.new_group()
    parameters: Any = parameter_server.all_reduce(rank, size, group)
    curves = {"all_reduce": parameters.curve}
    for mode in SERVER_MODES:
        if server := run_mode(mode, rank, size, group):
            curves[mode.__name__] = server.parameters.curve
    inputs, labels = parameter_server.make_batch(0, 1024)
    loss: Any = parameter_server.compute_loss
    found = {
        name: [(seconds, loss(weight, inputs, labels).item()) for seconds, weight in curve]
        for name, curve in curves.items()
        if rank == 0
    }
    torch.set_default_dtype(torch.float32)
    return found


def zero_stages(rank: int, size: int) -> None:
    """A step of each method of zero, without the library's."""
    # in the rank: what fully_shard imports leaves a message at the end of a process forked after it
    from playground.lessons.zero import lesson as zero

    for train in (zero.data_parallel, zero.zero1, zero.zero2, zero.zero3):
        torch.manual_seed(SEED)
        train(GPT(), [make_batch(1, seed=rank)])  # type: ignore[no-untyped-call]


def memory_gradients(rank: int, size: int) -> None:
    """The gradients of memory, averaged, with blocks that keep everything and blocks that compute
    again."""
    from playground.lessons.memory import lesson as memory

    part = make_batch(2 * size, seed=SEED).chunk(size)[rank]
    for block in (Block, memory.RecomputedBlock):
        memory.average(memory.compute_gradients(block, part)[:8])


def routed_rows(rank: int, size: int) -> dict[float, list[int]]:
    """By balance, the rows that this rank sends to each expert of the first block, in the last step
    of a training."""
    found = {}
    torch.set_default_dtype(torch.float64)
    for balance in (0.0, experts.BALANCE):
        model, counts = experts.make_model(experts.expert_parallel), list[torch.Tensor]()
        experts.keep_experts(model)

        def sum_over_ranks(tensor: torch.Tensor, counts: list[torch.Tensor] = counts) -> None:
            if tensor.shape == (2, experts.EXPERTS):
                counts.append(tensor[0].clone())
            dist.all_reduce(tensor)

        experts.train(model, balance, [rank], sum_over_ranks)
        found[balance] = counts[-len(model.blocks)].long().tolist()
    torch.set_default_dtype(torch.float32)
    return found


def routed_layer(rank: int, size: int) -> None:
    """Forward and backward of a layer of experts, with few tokens."""
    layer = experts.MixtureOfExperts(experts.expert_parallel)
    layer.experts = layer.experts[::size]
    layer(make_batch(1, seed=rank)[:, :4, None].expand(1, 4, C) / V).sum().backward()


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


def pipeline_schedules(rank: int, size: int) -> None:
    """A step of four microbatches by each schedule of pipeline, without the library's."""
    from playground.lessons.pipeline import lesson as pipeline

    pipeline.MICROBATCHES = 4  # a small recording
    batch = make_batch(pipeline.MICROBATCHES * pipeline.SEQUENCES, seed=SEED)
    part = slice(pipeline.BLOCKS * rank // size, pipeline.BLOCKS * (rank + 1) // size)
    groups = {"forward": dist.new_group(), "backward": dist.new_group()}
    for schedule in (pipeline.naive, pipeline.gpipe, pipeline.one_forward_one_backward):
        layers = pipeline.make_model()[part]
        stage = pipeline.Stage(layers, batch, groups)
        schedule(stage)  # type: ignore[no-untyped-call]
        for handle in stage.sending:
            handle.wait()


def context_rings(rank: int, size: int) -> None:
    """The gradients of a sequence by both rings of context."""
    # in the rank: what context_parallel imports takes seconds
    from playground.lessons.context import lesson as context

    context.SEQUENCES = 1  # a small recording
    for method in (context.contiguous, context.zigzag):
        method(make_batch(1, seed=SEED), rank, size)  # type: ignore[no-untyped-call]


def saved_blocks(rank: int, size: int) -> None:
    """A matrix of which each rank holds a block is saved, in blocks of 2 x 2 ranks."""
    # in the rank: what torch.distributed.checkpoint imports takes seconds
    from playground.lessons.checkpoint import lesson as checkpoint

    with temporary_folder("blocks") as folder:
        block = checkpoint.cut(torch.arange(16.0).view(4, 4), (size // 2, 2), rank)
        checkpoint.save(folder, {"weight": block})


def elastic_start(
    rank: int,
    size: int,
    folder: Path,
    images: int,
    epochs: int,
    every: int,
    kill: int,
    restarts: int,
) -> int:
    """A start of elastic's training on the digits in the folder, of which the last rank is killed
    `kill` steps after each start but the last. Reports where it begins and where it is killed, and
    returns the number of its steps."""

    def kill_last_rank(rank: int, size: int, step: int) -> None:
        if rank == size - 1 and restart_count() < restarts:
            report(killed=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def load(*args: Any) -> tuple[int, torch.Tensor | None]:
        done, state = load_snapshot(*args)  # type: ignore[no-untyped-call]
        report(resumed=done)
        return done, state

    os.environ[DATA_DIR] = str(folder / "digits")
    elastic.IMAGES = images
    elastic.EPOCHS = epochs
    elastic.SAVE_EVERY = every
    elastic.KILL_AFTER = kill
    load_snapshot = elastic.load
    vars(elastic).update(load=load, kill_last_rank=kill_last_rank)
    with contextlib.redirect_stdout(None):
        elastic.train_from_snapshot(rank, size, folder / "snapshot.pt")
    return epochs * images // elastic.BATCH_SIZE


def sent_gradients(rank: int, size: int) -> None:
    """Three steps by each method of bytes that sends gradients."""
    # in the rank: what PowerSGD imports takes seconds
    from playground.lessons.bytes import lesson as bytes_

    vars(bytes_).update(CLASSES=4, FEATURES=8, BATCH=4, STEPS=3, ONE_IN=8)
    for method in (bytes_.data_parallel, bytes_.top_k, bytes_.power_sgd):
        bytes_.measure(method, rank, size)


def causal_pairs(rank: int, size: int) -> dict[str, list[tuple[int, int, int]]]:
    """By order of context, what this rank computes: a query's position, that of a first key, and
    the number of keys from there on."""
    from playground.lessons.context import lesson as context

    orders: dict[str, tuple[Any, Any]] = {
        "contiguous": (lambda r, n: torch.arange(T).chunk(n)[r], context.contiguous_visible),
        "zigzag": (context.zigzag_positions, context.zigzag_visible),
    }
    found: dict[str, list[tuple[int, int, int]]] = {order: [] for order in orders}
    for order, (positions_of, visible) in orders.items():
        for source in range(size):
            everything = slice(None), slice(None)
            queries, keys = everything if source == rank else visible(rank, source)
            theirs = positions_of(source, size)[keys]
            for query in positions_of(rank, size)[queries].tolist():
                seen = theirs[theirs <= query] if source == rank else theirs
                for run in seen.tensor_split((seen.diff() > 1).nonzero().flatten() + 1):
                    if len(run):
                        found[order].append((query, int(run[0]), len(run)))
    return found


def train_on_mesh(rank: int, size: int, shape: dict[str, int], steps: int) -> MeshPlace:
    """A training of mesh, in float64 as in the lesson."""
    from playground.lessons.mesh import lesson

    mesh: Any = lesson
    mesh.STEPS = steps
    torch.set_default_dtype(torch.float64)
    batches = [make_batch(mesh.SEQUENCES * size, seed=step) for step in range(steps)]
    worlds = mesh.give_worlds(shape)
    mesh.train(shape, batches)
    names = map(" x ".join, mesh.GROUPS)
    return MeshPlace(
        coordinates=mesh.coordinates_of(rank, shape),
        groups={
            name: MeshGroup(ranks=dist.get_process_group_ranks(world.group), sent=world.sent)
            for name, world in zip(names, worlds, strict=True)
        },
    )
