"""The published mistake, then the same training by all-reduce and by a server in every mode."""

from __future__ import annotations

import time
from collections import Counter
from math import ceil
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.algorithms.cost_model import Task
from playground.algorithms.ring import ring_cost
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
from playground.lessons.parameter_server.mistake import repeat_the_mistake
from playground.lessons.parameter_server.page import ALL_REDUCE, SERVER, ModeResult, Point, ServerResult, ServerSettings
from playground.measurement.interleave import Heartbeat
from playground.remote import AGENTS
from playground.runtime import PeerDisconnected, device
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.training.data import Images
from playground.training.replicas import flat

delivered: SimpleQueue[tuple[ModeResult, torch.Tensor] | None] = SimpleQueue()
"""On the server's rank: the workers' result without it, with the parameters; None if one of them died."""


def run(rank: int, size: int, settings: ServerSettings) -> ServerResult:
    """Repeat the published mistake, train by all-reduce, then by a server in every mode.

    The server's rank returns the results of the modes, each worker that of the mistake.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    workers = dist.new_group(list(range(1, size)))
    with AGENTS[settings.over]() as agent:
        mistake = repeat_the_mistake(agent, workers)
        if rank == SERVER:
            modes = serve(agent, size - 1, settings)
        else:
            modes = []
            work(agent, workers, settings)
    return ServerResult(mistake=mistake, modes=modes)


def serve(agent: Any, workers: int, settings: ServerSettings) -> list[ModeResult]:
    """The server's part: wait for the result of all-reduce, then serve in every mode."""
    agent.on_loss(lambda rank: delivered.put(None))
    by_all_reduce = delivered.get()
    if not by_all_reduce:
        raise PeerDisconnected(SERVER, workers + 1, "has lost a worker in training by all-reduce")
    result, parameters = by_all_reduce
    return [result, *(serve_mode(agent, mode, workers, settings, parameters) for mode in settings.modes)]


def serve_mode(
    agent: Any, mode: str, workers: int, settings: ServerSettings, early_by_all_reduce: torch.Tensor
) -> ModeResult:
    """Make the server, announce it, and wait. Other threads answer the workers' calls. `early_by_all_reduce`: the
    parameters after the first few steps without a server, to compare with."""
    server = MeasuredServer(new_model(settings), mode, workers, settings)
    servers[:] = [server]
    agent.on_loss(lambda rank: server.lose_worker(rank - 1))
    agent.barrier()
    server.join()
    return server.history.result(server.model, server.taken, server.lost, early_by_all_reduce)


def work(agent: Any, workers: Any, settings: ServerSettings) -> None:
    """A worker's part: by all-reduce first, then with a server in every mode."""
    warm_up(settings, workers)
    result, parameters = train_by_all_reduce(workers, settings)
    if agent.rank == SERVER + 1:
        agent.call(SERVER, deliver, result, parameters)
    for _ in settings.modes:
        agent.barrier()
        train_with_server(agent, workers, settings)


def warm_up(settings: ServerSettings, workers: Any) -> None:
    """Compute a gradient that is not used: the first one takes longer."""
    images, labels, _ = next(whole_batches(settings, workers))
    F.nll_loss(new_model(settings)(images), labels).backward()


def deliver(result: ModeResult, parameters: torch.Tensor) -> None:
    """Runs on the server: keep the result of all-reduce."""
    delivered.put((result, parameters))


def train_by_all_reduce(workers: Any, settings: ServerSettings) -> tuple[ModeResult, torch.Tensor]:
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
    )
    return result, early


POINTS = 10
"""Points of the curve that is shown."""
TESTED = 2_000
"""Images of the test set."""


class LossHistory:
    """Counts from its construction on. `per_step`: number of calls of `add` for a step of all workers."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.started, self.samples = time.perf_counter(), 0
        self.losses: list[tuple[float, int, float]] = []
        """(seconds, samples, their summed loss) of each gradient."""

    def add(self, loss: float, samples: int) -> None:
        """Count a gradient of `samples` samples, whose losses sum to `loss`."""
        self.samples += samples
        self.losses.append((time.perf_counter() - self.started, samples, loss))

    def result(self, **about: Any) -> ModeResult:
        """The result of a mode; its time is that from the start to the last gradient."""
        return ModeResult(seconds=self.losses[-1][0], samples=self.samples, points=self.points(), **about)

    def points(self) -> list[Point]:
        """The curve: as many steps from one point to the next, the last few to the last."""
        points, seen = [], 0
        stride = self.per_step * ceil(len(self.losses) / self.per_step / POINTS)
        for first in range(0, len(self.losses), stride):
            part = self.losses[first : first + stride]
            samples = sum(number for _, number, _ in part)
            seen += samples
            loss = sum(loss for *_, loss in part) / samples
            points.append(Point(samples=seen, seconds=part[-1][0], loss=loss))
        return points


class ServerHistory:
    """Counts the gradients that a server takes in one mode."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        self.mode, self.workers, self.settings = mode, workers, settings
        self.losses = LossHistory(per_step=workers)
        self.staleness: Counter[int] = Counter()
        self.bytes = 0
        """Bytes that the server has sent and received."""
        self.early = flat(model.parameters()).cpu()
        """The parameters after the gradients of `settings.early_steps` steps."""
        self.heartbeat = Heartbeat()

    def add(self, nbytes: int, staleness: int, loss: float, samples: int) -> None:
        """Count a gradient of `nbytes` bytes and `samples` samples, whose losses sum to `loss`."""
        self.bytes += nbytes
        self.staleness[staleness] += 1
        self.losses.add(loss, samples)
        total = self.settings.steps * self.workers
        self.heartbeat.beat(phase=f"training, {self.mode}", step=self.staleness.total(), steps=total)

    def result(
        self, model: nn.Module, taken: list[int], lost: dict[int, int], early_by_all_reduce: torch.Tensor
    ) -> ModeResult:
        """The result. `taken`: gradients of each worker; `lost`: workers that died, and how many gradients in all had
        been taken by then; `early_by_all_reduce`: the parameters after as many gradients as `early`, without a server.
        """
        return self.losses.result(
            mode=self.mode,
            staleness=dict(sorted(self.staleness.items())),
            gradients_by_worker=taken,
            bytes_per_step=round(self.bytes / self.settings.steps),
            test_accuracy=test_accuracy(model, self.settings),
            lost_workers=lost,
            difference_to_all_reduce=(self.early - early_by_all_reduce).abs().max().item(),
        )


class MeasuredServer(ParameterServer):
    """A server whose history is kept: what it takes, how old that is, and what it sends."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        super().__init__(model, mode, workers, settings)
        self.history = ServerHistory(model, mode, workers, settings)

    def take(self, push: Push) -> None:
        self.history.add(push.gradient.nbytes, self.version - push.version, push.loss, push.samples)
        super().take(push)

    def step(self, gradient: torch.Tensor) -> None:
        super().step(gradient)
        if self.history.staleness.total() == self.settings.early_steps * self.workers:
            self.history.early = flat(self.model.parameters()).cpu()

    def reply(self, worker: int) -> Parameters:
        parameters, version, finished = super().reply(worker)
        self.history.bytes += parameters.nbytes
        return parameters, version, finished


@torch.no_grad()
def test_accuracy(model: nn.Module, settings: ServerSettings) -> float:
    """The share of right answers for the first `TESTED` images of the test set."""
    images, labels = Images(settings.folder, "t10k", TESTED).span(0, TESTED)
    images = images.to(device(), torch.get_default_dtype())
    return (model.eval()(images).argmax(1).cpu() == labels).double().mean().item()
