"""The same training by all-reduce, and by a server in every mode."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.algorithms.cost_model import Task, ring_cost
from playground.lessons.mnist import Net
from playground.lessons.parameter_server.lesson import (
    SERVER,
    ParameterServer,
    Reply,
    compute_gradient,
    flatten,
    serve,
    unflatten,
    work,
)
from playground.lessons.parameter_server.page import ALL_REDUCE, ModeResult, ServerSettings
from playground.lessons.partition import share
from playground.lessons.rpc.agent import Agent
from playground.measurement.interleave import Heartbeat
from playground.runtime import device, synchronize
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.training.data import Images, batches, partition_dataset


def run(rank: int, size: int, settings: ServerSettings) -> list[ModeResult]:
    """Train by all-reduce, then by a server in every mode. The server's rank returns the result of
    each, the others an empty list."""
    require_same_on_all_ranks(settings.on_all_ranks())
    workers = dist.new_group(list(range(1, size)))
    with Agent() as agent:
        if rank == SERVER:
            by_all_reduce: list[Any] = [None]
        else:
            by_all_reduce = [train_by_all_reduce(workers, settings)]
        dist.broadcast_object_list(by_all_reduce, src=SERVER + 1)
        result, early_parameters = by_all_reduce[0]
        if rank != SERVER:
            for _ in settings.modes:
                work(agent, dist.get_rank(workers), new_worker(settings, workers))
            return []
        results = [result]
        for mode in settings.modes:
            server = MeasuredServer(new_model(settings), mode, size - 1, settings)
            serve(agent, server)
            results.append(server.result(early_parameters))
        return results


def new_worker(
    settings: ServerSettings, workers: Any
) -> Callable[[torch.Tensor], tuple[torch.Tensor, float]]:
    """This worker's `compute`, for `work`, at its pace."""
    compute = partial(
        compute_gradient, new_model(settings), F.nll_loss, whole_batches(settings, workers)
    )

    def compute_slowly(parameters: torch.Tensor) -> tuple[torch.Tensor, float]:
        with paced(settings, workers):
            return compute(parameters)

    return compute_slowly


def new_model(settings: ServerSettings) -> nn.Module:
    """The model, equal on every rank."""
    torch.manual_seed(settings.seed)
    return Net().to(device(), memory_format=torch.channels_last)


def whole_batches(
    settings: ServerSettings, workers: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """This worker's (images, labels, samples per worker) of every global batch, without end. All
    batches are whole, so that all gradients count alike. From here on, every worker has dropout
    masks of its own."""
    samples = (
        len(Images(settings.folder, "train", settings.limit))
        // settings.batch_size
        * settings.batch_size
    )
    images = Images(settings.folder, "train", samples)
    train_set, _ = partition_dataset(images, settings.batch_size, settings.seed, group=workers)
    torch.manual_seed(settings.seed + 1 + dist.get_rank(workers))
    while True:
        for images, labels, samples_per_worker in batches(
            train_set, settings.batch_size, group=workers
        ):
            yield images.to(torch.get_default_dtype()), labels, samples_per_worker


@contextlib.contextmanager
def paced(settings: ServerSettings, workers: Any) -> Iterator[None]:
    """Slow the last worker down: for it, the `with` block takes `settings.slow_worker` times as
    long."""
    synchronize()
    started = time.perf_counter()
    yield
    if dist.get_rank(workers) == dist.get_world_size(workers) - 1:
        synchronize()
        time.sleep((settings.slow_worker - 1) * (time.perf_counter() - started))


def train_by_all_reduce(workers: Any, settings: ServerSettings) -> tuple[ModeResult, torch.Tensor]:
    """Train on every worker. Returns the result, and the parameters after `early_steps`."""
    model, size = new_model(settings), dist.get_world_size(workers)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=settings.lr, momentum=settings.momentum)
    coming = whole_batches(settings, workers)
    images, labels, _ = next(whole_batches(settings, workers))
    # a gradient that is not used: the first takes longer
    F.nll_loss(new_model(settings)(images), labels).backward()
    started, losses = time.perf_counter(), list[tuple[float, int]]()
    for step in range(1, settings.steps + 1):
        with paced(settings, workers):
            images, labels, samples_per_worker = next(coming)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            (loss / samples_per_worker).backward()
        summed = torch.cat([*(param.grad.flatten() for param in params), loss.detach().view(1)])
        dist.all_reduce(summed, group=workers)
        for param, part in zip(params, unflatten(summed[:-1] / size, params), strict=True):
            param.grad = part
        optimizer.step()
        if step == settings.early_steps:
            early = flatten(params)
        losses.append((summed[-1].item(), settings.batch_size))
    ring = ring_cost(Task(size=size, nbytes=summed[:-1].nbytes))
    result = summarize(
        ALL_REDUCE,
        time.perf_counter() - started,
        losses,
        staleness={0: settings.steps * size},
        gradients_by_worker=[settings.steps] * size,
        bytes_per_step=round(2 * ring.total.bytes / size),
        difference_to_all_reduce=0.0,
    )
    return result, early


def summarize(
    mode: str, seconds: float, losses: Sequence[tuple[float, int]], **about: Any
) -> ModeResult:
    """The result of a mode. `losses`: of each gradient its samples' summed loss, and their number;
    `about`: the other fields."""
    samples = sum(count for _, count in losses)
    last = losses[-ceil(len(losses) / 10) :]
    return ModeResult(
        mode=mode,
        seconds=seconds,
        samples=samples,
        speed=samples / seconds,
        last_loss=sum(loss for loss, _ in last) / sum(count for _, count in last),
        **about,
    )


class MeasuredServer(ParameterServer):
    """A server that keeps account of what it takes, how old that is, and what it sends."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        super().__init__(
            model, mode, workers, settings.steps, settings.lr, settings.momentum, settings.staleness
        )
        self.settings = settings
        self.heartbeat = Heartbeat()
        self.started = time.perf_counter()
        self.seconds = 0.0
        """From the start to the last gradient."""
        self.losses: list[tuple[float, int]] = []
        """The summed loss of each gradient's samples, and their number."""
        self.staleness_counts: Counter[int] = Counter()
        """Number of gradients, by how often the parameters had changed since the worker got
        them."""
        self.sent = [0] * workers
        """The version of the parameters that each worker got last."""
        self.bytes = 0
        """Bytes sent and received."""
        self.early = flatten(self.params)
        """The parameters after the gradients of `settings.early_steps` steps."""

    def take(self, worker: int, gradient: torch.Tensor, loss: float) -> None:
        self.bytes += gradient.nbytes
        self.staleness_counts[self.version - self.sent[worker]] += 1
        self.losses.append((loss, share(self.settings.batch_size, worker, self.workers)))
        self.seconds = time.perf_counter() - self.started
        step, total = self.staleness_counts.total(), self.settings.steps * self.workers
        self.heartbeat.beat(phase=f"training, {self.mode}", step=step, steps=total)
        super().take(worker, gradient, loss)

    def step(self, gradient: torch.Tensor) -> None:
        super().step(gradient)
        if self.staleness_counts.total() == self.settings.early_steps * self.workers:
            self.early = flatten(self.params)

    def reply(self, worker: int) -> Reply:
        parameters, finished = super().reply(worker)
        self.bytes += parameters.nbytes
        self.sent[worker] = self.version
        return parameters, finished

    def result(self, early_by_all_reduce: torch.Tensor) -> ModeResult:
        """The result of the mode. `early_by_all_reduce`: the parameters after as many gradients as
        `early`, without a server."""
        return summarize(
            self.mode,
            self.seconds,
            self.losses,
            staleness=dict(sorted(self.staleness_counts.items())),
            gradients_by_worker=self.taken,
            bytes_per_step=round(self.bytes / self.settings.steps),
            difference_to_all_reduce=(self.early - early_by_all_reduce).abs().max().item(),
        )
