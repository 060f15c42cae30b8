"""A parameter server: one rank owns the parameters, the others compute gradients, each on a copy of its own.

    python -m playground parameter-server
    python -m playground parameter-server --slow-worker 5
    python -m playground parameter-server -n 9 --mode async

Rank 0 is the server. A worker pulls the parameters, computes a gradient on its part of a batch and pushes it; the reply
brings the parameters for the next one. When the server takes a step, and when it replies, is the mode: synchronous,
asynchronous, or in between. All that travels are remote calls (playground/remote/).
No graph reaches from a worker into the server's parameters, so none breaks when they change.
Sources: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Ho et al., More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.parameter_server.page import SERVER, ServerSettings
from playground.lessons.sgd.lesson import Net
from playground.remote.agent import Agent
from playground.runtime import device, synchronize
from playground.training.data import Images, batches, partition_dataset
from playground.training.replicas import flat, unflatten

Parameters = tuple[torch.Tensor, int, bool]
"""(all parameters, flattened, their version, whether the training has ended)"""


class Push(NamedTuple):
    """A worker's result on its part of a batch: the flattened gradient of the mean loss, as if its part were the batch,
    the version of the parameters it was computed on, and the loss, summed over the samples."""

    worker: int
    gradient: torch.Tensor
    version: int
    loss: float
    samples: int


class ParameterServer:
    """Owns the parameters and the optimizer. The workers call `pull` and `push`, each call in a thread of its own.
    Takes steps as `mode` says, until it has taken `settings.steps` gradients for each worker."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        self.model, self.mode, self.workers, self.settings = model, mode, workers, settings
        self.optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
        self.version = 0
        self.taken = [0] * workers
        """The gradients of each worker that have been taken."""
        self.waiting: dict[int, torch.Tensor] = {}
        """Synchronous: the gradients of this step that have come, by worker."""
        self.active = set(range(workers))
        """Workers that do not know yet that the training has ended."""
        self.changed = threading.Condition()

    def pull(self, worker: int) -> Parameters:
        """The parameters as they are. A worker begins with this."""
        with self.changed:
            return self.reply(worker)

    def push(self, push: Push) -> Parameters:
        """Take a gradient; return the parameters when the worker may continue."""
        with self.changed:
            if not self.finished:
                self.take(push)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.finished or self.may_go_on(push))
            return self.reply(push.worker)

    def take(self, push: Push) -> None:
        """Take a step with this gradient, or, synchronous, with the mean of all workers', once they are there. Each
        counts 1 / workers: a pass over the data moves the parameters equally far in every mode."""
        self.taken[push.worker] += 1
        if self.mode != "sync":
            self.step(push.gradient / self.workers)
            return
        self.waiting[push.worker] = push.gradient
        if len(self.waiting) == self.workers:
            self.step(sum(self.waiting[worker] for worker in range(self.workers)) / self.workers)
            self.waiting.clear()

    def step(self, gradient: torch.Tensor) -> None:
        load_gradients(self.model, gradient)
        self.optimizer.step()
        self.version += 1

    def may_go_on(self, push: Push) -> bool:
        if self.mode == "sync":
            return self.version > push.version
        return self.mode == "async" or self.taken[push.worker] - min(self.taken) <= self.settings.staleness

    def reply(self, worker: int) -> Parameters:
        """The reply to a worker. Told that the training has ended, it leaves."""
        if self.finished:
            self.active.discard(worker)
            self.changed.notify_all()
        return flat(self.model.parameters()).cpu(), self.version, self.finished

    @property
    def finished(self) -> bool:
        return sum(self.taken) == self.settings.steps * self.workers and not self.waiting

    def join(self) -> None:
        """Wait until every worker knows that the training has ended."""
        with self.changed:
            self.changed.wait_for(lambda: not self.active)


servers: list[ParameterServer] = []
"""On the server's rank: the one that answers."""


def pull(worker: int) -> Parameters:
    """Runs on the server: the parameters."""
    return servers[0].pull(worker)


def push(computed: Push) -> Parameters:
    """Runs on the server: take a gradient, return the parameters for the next."""
    return servers[0].push(computed)


def train_with_server(agent: Agent, workers: Any, settings: ServerSettings) -> None:
    """Compute a gradient on a copy of the parameters, push it, and get the next copy, until the server says enough."""
    model, coming = new_model(settings), whole_batches(settings, workers)
    worker = dist.get_rank(workers)
    parameters, version, finished = agent.call(SERVER, pull, worker)
    while not finished:
        with paced(settings, workers):
            images, labels, samples_per_worker = next(coming)
            load_parameters(model, parameters)
            model.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            (loss / samples_per_worker).backward()
        gradient = flat(param.grad for param in model.parameters()).cpu()
        computed = Push(worker, gradient, version, loss.item(), len(labels))
        parameters, version, finished = agent.call(SERVER, push, computed)


@torch.no_grad()
def load_parameters(model: nn.Module, parameters: torch.Tensor) -> None:
    params = list(model.parameters())
    for param, part in zip(params, unflatten(parameters, params), strict=True):
        param.copy_(part)


def load_gradients(model: nn.Module, gradient: torch.Tensor) -> None:
    params = list(model.parameters())
    for param, part in zip(params, unflatten(gradient, params), strict=True):
        param.grad = part.to(param.device)


def new_model(settings: ServerSettings) -> nn.Module:
    """The model, equal on every rank."""
    torch.manual_seed(settings.seed)
    return Net().to(device(), memory_format=torch.channels_last)


def whole_batches(settings: ServerSettings, workers: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """This worker's (images, labels, samples per worker) of every global batch, without end. All batches are whole, so
    that all gradients count alike. From here on, every worker has dropout masks of its own."""
    samples = len(Images(settings.folder, "train", settings.limit)) // settings.batch_size * settings.batch_size
    images = Images(settings.folder, "train", samples)
    train_set, _ = partition_dataset(images, settings.batch_size, settings.seed, group=workers)
    torch.manual_seed(settings.seed + 1 + dist.get_rank(workers))
    while True:
        for images, labels, samples_per_worker in batches(train_set, settings.batch_size, group=workers):
            yield images.to(torch.get_default_dtype()), labels, samples_per_worker


@contextlib.contextmanager
def paced(settings: ServerSettings, workers: Any) -> Iterator[None]:
    """Slow the last worker down: for it, the `with` block takes `settings.slow_worker` times as long."""
    synchronize()
    started = time.perf_counter()
    yield
    if dist.get_rank(workers) == dist.get_world_size(workers) - 1:
        synchronize()
        time.sleep((settings.slow_worker - 1) * (time.perf_counter() - started))


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
