"""The published mistake, then the same training by all-reduce and by a server in every mode."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from functools import partial
from math import ceil
from queue import SimpleQueue
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import nn

from playground.algorithms.cost_model import Task, ring_cost
from playground.lessons.parameter_server.lesson import (
    Parameters,
    ParameterServer,
    Push,
    load_gradients,
    new_model,
    paced,
    servers,
    train_with_server,
    whole_batches,
)
from playground.lessons.parameter_server.page import ALL_REDUCE, SERVER, ServerSettings
from playground.measurement import Fields
from playground.measurement.interleave import Heartbeat
from playground.remote import AGENTS
from playground.remote.agent import Agent
from playground.remote.autograd import apply_remotely
from playground.runtime import PeerDisconnected, device
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.training.data import Images
from playground.training.net import Net
from playground.training.replicas import flat

delivered: SimpleQueue[tuple[Fields, torch.Tensor] | None] = SimpleQueue()
"""On the server's rank: the workers' result without it, with the parameters; None if one of them died."""


def run(rank: int, size: int, settings: ServerSettings) -> list[Fields] | Fields | None:
    """Repeat the published mistake, train by all-reduce, then by a server in every mode.

    The server's rank returns the results of all-reduce and of each mode, each worker that of the mistake.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    workers = dist.new_group(list(range(1, size)))
    with AGENTS[settings.over]() as agent:
        mistake = repeat_the_mistake(agent, workers)
        if rank == SERVER:
            return serve(agent, size - 1, settings)
        work(agent, workers, settings)
        return mistake


def serve(agent: Any, workers: int, settings: ServerSettings) -> list[Fields]:
    """The server's part: wait for the result of all-reduce, then serve in every mode."""
    agent.on_loss(lambda rank: delivered.put(None))
    by_all_reduce = delivered.get()
    if not by_all_reduce:
        raise PeerDisconnected(SERVER, workers + 1, "has lost a worker in training by all-reduce")
    result, parameters = by_all_reduce
    return [result, *(serve_mode(agent, mode, workers, settings, parameters) for mode in settings.modes)]


def serve_mode(agent: Any, mode: str, workers: int, settings: ServerSettings, early_parameters: torch.Tensor) -> Fields:
    """Make the server, announce it, and wait. Other threads answer the workers' calls. `early_parameters`: the
    parameters after the first few steps without a server, to compare with."""
    server = MeasuredServer(new_model(settings), mode, workers, settings)
    servers[:] = [server]
    agent.on_loss(lambda rank: server.lose_worker(rank - 1))
    agent.barrier()
    server.join()
    return server.result(early_parameters)


def work(agent: Any, workers: Any, settings: ServerSettings) -> None:
    """A worker's part: by all-reduce first, then with a server in every mode."""
    images, labels, _ = next(whole_batches(settings, workers))
    F.nll_loss(new_model(settings)(images), labels).backward()  # a gradient that is not used: the first takes longer
    result, parameters = train_by_all_reduce(workers, settings)
    if agent.rank == SERVER + 1:
        agent.call(SERVER, deliver, result, parameters)
    for _ in settings.modes:
        agent.barrier()
        train_with_server(agent, workers, settings)


def deliver(result: Fields, parameters: torch.Tensor) -> None:
    """Runs on the server: keep the result of all-reduce."""
    delivered.put((result, parameters))


def train_by_all_reduce(workers: Any, settings: ServerSettings) -> tuple[Fields, torch.Tensor]:
    """Train on every worker. Returns the result (its bytes are those of a ring), and the early parameters."""
    model, size = new_model(settings), dist.get_world_size(workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    coming = whole_batches(settings, workers)
    history = LossHistory(per_step=1)
    for step in range(1, settings.steps + 1):
        with paced(settings, workers):
            images, labels, samples_per_worker = next(coming)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            (loss / samples_per_worker).backward()
        summed = torch.cat([flat(param.grad for param in model.parameters()), loss.detach().view(1)])
        dist.all_reduce(summed, group=workers)
        load_gradients(model, summed[:-1] / size)
        optimizer.step()
        if step == settings.early_steps:
            early = flat(model.parameters()).cpu()
        history.add(summed[-1].item(), settings.batch_size)
    ring = ring_cost(Task(size=size, nbytes=summed[:-1].nbytes))
    result = history.result(
        mode=ALL_REDUCE,
        staleness={0: settings.steps * size},
        gradients_by_worker=[settings.steps] * size,
        bytes_per_step=round(2 * ring.total.bytes / size),
        test_accuracy=test_accuracy(model, settings),
        lost_workers={},
        difference_to_all_reduce=0.0,
    )
    return result, early


POINTS = 10
"""Points of the curve that is shown."""
TESTED = 2_000
"""Images of the test set."""


class LossHistory:
    """Counts from its construction on. `per_step`: number of calls of `add` for a step of all workers."""

    def __init__(self, per_step: int) -> None:
        self.per_step, self.started = per_step, time.perf_counter()
        self.losses: list[tuple[float, int, float]] = []
        """(seconds, samples, their summed loss) of each gradient."""

    def add(self, loss: float, samples: int) -> None:
        """Count a gradient of `samples` samples, whose losses sum to `loss`."""
        self.losses.append((time.perf_counter() - self.started, samples, loss))

    def result(self, **about: Any) -> Fields:
        """The result of a mode, and the curve of its losses: as many steps from one point to the next, the last few to
        the last. A point's loss is the mean over the samples since the one before, with dropout on; seconds are those
        from the start."""
        points, seen = list[Fields](), 0
        stride = self.per_step * ceil(len(self.losses) / self.per_step / POINTS)
        for first in range(0, len(self.losses), stride):
            seconds, samples, losses = zip(*self.losses[first : first + stride], strict=True)
            seen += sum(samples)
            points.append({"samples": seen, "seconds": seconds[-1], "loss": sum(losses) / sum(samples)})
        whole = {"seconds": seconds[-1], "samples": seen}
        return {"mode": about.pop("mode"), **whole, "points": points, **about, "speed": seen / seconds[-1]}


class MeasuredServer(ParameterServer):
    """A server that keeps account of what it takes, how old that is, and what it sends."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        super().__init__(model, mode, workers, settings)
        self.history, self.heartbeat = LossHistory(per_step=workers), Heartbeat()
        self.staleness: Counter[int] = Counter()
        self.bytes = 0
        """Bytes sent and received."""
        self.early = flat(model.parameters()).cpu()
        """The parameters after the gradients of `settings.early_steps` steps."""

    def take(self, push: Push) -> None:
        self.bytes += push.gradient.nbytes
        self.staleness[self.version - push.version] += 1
        self.history.add(push.loss, push.samples)
        total = self.settings.steps * self.workers
        self.heartbeat.beat(phase=f"training, {self.mode}", step=self.staleness.total(), steps=total)
        super().take(push)

    def step(self, gradient: torch.Tensor) -> None:
        super().step(gradient)
        if self.staleness.total() == self.settings.early_steps * self.workers:
            self.early = flat(self.model.parameters()).cpu()

    def reply(self, worker: int) -> Parameters:
        parameters, version, finished = super().reply(worker)
        self.bytes += parameters.nbytes
        return parameters, version, finished

    def result(self, early_by_all_reduce: torch.Tensor) -> Fields:
        """The result of the mode. `early_by_all_reduce`: the parameters after as many gradients as `early`, without a
        server; `difference_to_all_reduce` is the largest of any parameter.

        `staleness` counts gradients by how often the parameters had changed since the worker got them;
        `bytes_per_step` are those that the busiest rank sends and receives for a gradient of every worker;
        `lost_workers` has for each that died how many gradients had been taken by then, 0 if it was before this mode.
        """
        return self.history.result(
            mode=self.mode,
            staleness=dict(sorted(self.staleness.items())),
            gradients_by_worker=self.taken,
            bytes_per_step=round(self.bytes / self.settings.steps),
            test_accuracy=test_accuracy(self.model, self.settings),
            lost_workers=self.lost,
            difference_to_all_reduce=(self.early - early_by_all_reduce).abs().max().item(),
        )


@torch.no_grad()
def test_accuracy(model: nn.Module, settings: ServerSettings) -> float:
    """The share of right answers for the first `TESTED` images of the test set."""
    images, labels = Images(settings.folder, "t10k", TESTED).span(0, TESTED)
    images = images.to(device(), torch.get_default_dtype())
    return (model.eval()(images).argmax(1).cpu() == labels).double().mean().item()


IN_PLACE = re.compile(r"one of the variables needed for gradient computation .*? instead")
"""Autograd's message, without its advice on debugging."""
models: list[nn.Module] = []
"""On the server's rank, the model that all workers train."""


def repeat_the_mistake(agent: Any, workers: Any) -> Fields | None:
    """The parameter server that many have copied: the workers' forward passes run through the server's own parameters.

    Every worker has the server compute part of its forward pass, so that its graph holds the server's parameters. Then
    one worker's step changes them, in place, and the next worker's backward pass finds other values than its forward
    pass used. With one worker nothing happens; with two it depends on who is faster. Here the order is fixed: all
    workers go forward, the first one backward, and steps; then the others go backward. Returns what this worker met;
    None on the server.
    Source: https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html; what becomes of it:
    pytorch/examples#780 and #856
    """
    models[:] = [Net().eval()]
    dist.barrier()
    met = None if agent.rank == SERVER else meet(agent, workers)
    dist.barrier()
    models.clear()
    return met


def meet(agent: Any, workers: Any) -> Fields:
    """One worker's part: the version of the server's parameters that its forward pass read, the one that its backward
    pass found, and the error of that, or nothing."""
    worker, error, ours = dist.get_rank(workers), "", isinstance(agent, Agent)
    read, images, labels = agent.call(SERVER, version), torch.ones(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    # torch.distributed.rpc keeps every worker's gradients in a context of its own
    with contextlib.nullcontext() if ours else dist_autograd.context() as context:
        output = apply_remotely(agent, SERVER, compute, images) if ours else agent.call(SERVER, compute, images)
        loss = F.nll_loss(output, labels)
        backward = loss.backward if ours else partial(dist_autograd.backward, context, [loss])
        dist.barrier(workers)
        found = agent.call(SERVER, version)
        if worker == 0:
            backward()
            agent.call(SERVER, take_step, context)
        dist.barrier(workers)
        if worker > 0:
            found = agent.call(SERVER, version)
            try:
                backward()
            except RuntimeError as raised:
                told = IN_PLACE.search(str(raised))
                if not told:
                    raise
                error = told[0]
    return {"worker": worker, "version_read": read, "version_found": found, "error": error}


def compute(images: torch.Tensor) -> torch.Tensor:
    """On the server: a forward pass through its parameters."""
    return models[0](images)


def version() -> int:
    """On the server: how often its first parameter was changed in place."""
    return next(models[0].parameters())._version


@torch.no_grad()
def take_step(context: int | None) -> None:
    """On the server: plain SGD, in place, with the gradients in `.grad` or, where torch keeps them, in that context."""
    gradients = {param: param.grad for param in models[0].parameters()}
    for param, gradient in (gradients if context is None else dist_autograd.get_gradients(context)).items():
        param -= 0.01 * gradient
