"""The parameter server itself: an object on one rank, whose methods the workers call.

It owns the parameters and the optimizer. A worker gets a copy of the parameters, computes a gradient on it, and pushes
that; the server adds and steps. No graph reaches from a worker into the server's parameters, so nobody is hurt when
they change. Nor when a worker dies: unless it steps with all workers' gradients, the server goes on with the others'.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from playground.lessons.parameter_server.history import LossHistory
from playground.lessons.parameter_server.results import ModeResult
from playground.lessons.parameter_server.settings import SERVER, ServerSettings
from playground.measurement.interleave import Heartbeat
from playground.runtime import PeerDisconnected, device
from playground.training.data import Images
from playground.training.replicas import flat

TESTED = 2_000
"""Images of the test set."""
Parameters = tuple[torch.Tensor, int, bool]
"""(all parameters in a row, their version, whether the training has ended)"""


@dataclass(frozen=True)
class Push:
    """What a worker computed on its part of a batch."""

    worker: int
    gradient: torch.Tensor
    """Of all parameters in a row: of the mean loss, as if its part were the batch."""
    version: int
    """Of the parameters it was computed on."""
    loss: float
    """Summed over the samples."""
    samples: int


class ParameterServer:
    """Takes steps as `mode` says, until it has taken `settings.steps` gradients for each worker."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        self.model, self.mode, self.workers, self.settings = model, mode, workers, settings
        self.optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
        self.version, self.taken = 0, [0] * workers
        self.active = set(range(workers))
        """Workers that have not been told yet that the training has ended."""
        self.lost: dict[int, int] = {}
        """Workers that died, and how many gradients in all had been taken by then."""
        self.waiting: dict[int, torch.Tensor] = {}
        """Synchronous: the gradients of this step that have come, by worker."""
        self.staleness: Counter[int] = Counter()
        self.history = LossHistory(per_step=workers)
        self.early = flat(model.parameters()).cpu()
        """The parameters after the gradients of `settings.early_steps` steps."""
        self.bytes, self.gradients = 0, settings.steps * workers
        self.heartbeat = Heartbeat()
        self.changed = threading.Condition()

    def pull(self, worker: int) -> Parameters:
        """The parameters as they are. A worker begins with this."""
        with self.changed:
            return self.reply(worker)

    def push(self, push: Push) -> Parameters:
        """Take a gradient in; return the parameters when the worker may go on."""
        with self.changed:
            if not self.finished:
                self.take(push)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.finished or self.may_go_on(push))
            return self.reply(push.worker)

    def lose_worker(self, worker: int) -> None:
        """Wait for this worker no more: it has died."""
        with self.changed:
            if worker in self.active:
                self.active.remove(worker)
                self.lost[worker] = sum(self.taken)
                self.changed.notify_all()

    def take(self, push: Push) -> None:
        """Take a step with this gradient, or, synchronous, with the mean of all workers', once they are there.

        Each counts 1 / workers: a pass over the data moves the parameters equally far in every mode.
        """
        self.bytes += push.gradient.nbytes
        self.taken[push.worker] += 1
        self.staleness[self.version - push.version] += 1
        self.history.add(push.loss, push.samples)
        self.heartbeat.beat(phase=f"training, {self.mode}", step=sum(self.taken), steps=self.gradients)
        if self.mode != "sync":
            self.step(push.gradient / self.workers)
            return
        self.waiting[push.worker] = push.gradient
        if len(self.waiting) == self.workers:
            self.step(sum(self.waiting[worker] for worker in range(self.workers)) / self.workers)
            self.waiting.clear()

    def may_go_on(self, push: Push) -> bool:
        """Whether the worker may have new parameters now."""
        if self.mode == "sync":
            return self.version > push.version
        ahead = self.taken[push.worker] - min(self.taken[worker] for worker in {push.worker, *self.active})
        return self.mode == "async" or ahead <= self.settings.staleness

    def step(self, gradient: torch.Tensor) -> None:
        """Take a step of the optimizer."""
        unflatten_gradients(self.model, gradient)
        self.optimizer.step()
        self.version += 1
        if sum(self.taken) == self.settings.early_steps * self.workers:
            self.early = flat(self.model.parameters()).cpu()

    def reply(self, worker: int) -> Parameters:
        """What a worker gets. Told that the training has ended, it leaves."""
        if self.finished:
            self.active.discard(worker)
            self.changed.notify_all()
        parameters = flat(self.model.parameters()).cpu()
        self.bytes += parameters.nbytes
        return parameters, self.version, self.finished

    @property
    def finished(self) -> bool:
        return sum(self.taken) == self.gradients and not self.waiting

    def result(self, early_by_all_reduce: torch.Tensor) -> ModeResult:
        """What came of it, when every worker has been told that the training has ended.

        `early_by_all_reduce`: the parameters after as many gradients as `early` without a server. Raises
        `PeerDisconnected` if there is none because too many workers have died: one is, where the server waits for all.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self.active or (self.lost and self.mode == "sync"))
            if not self.finished:
                raise worker_lost(self.workers, f"has lost worker {', '.join(map(str, self.lost))} in mode {self.mode}")
        return ModeResult(
            mode=self.mode, seconds=self.history.seconds, samples=self.history.samples, points=self.history.points(),
            staleness=dict(sorted(self.staleness.items())), gradients_by_worker=self.taken,
            bytes_per_step=round(self.bytes / self.settings.steps),
            test_accuracy=test_accuracy(self.model, self.settings), lost_workers=self.lost,
            difference_to_all_reduce=(self.early - early_by_all_reduce).abs().max().item(),
        )  # fmt: skip


def worker_lost(workers: int, how: str) -> PeerDisconnected:
    """What the server raises when it cannot go on without a worker that has died."""
    return PeerDisconnected(SERVER, workers + 1, how)


def unflatten_gradients(model: nn.Module, gradient: torch.Tensor) -> None:
    """Cut `gradient` into every parameter's own."""
    params = list(model.parameters())
    for param, part in zip(params, gradient.split([param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape).to(param.device)


@torch.no_grad()
def load_parameters(model: nn.Module, parameters: torch.Tensor) -> None:
    """Copy what the server has sent into the model."""
    params = list(model.parameters())
    for param, part in zip(params, parameters.split([param.numel() for param in params]), strict=True):
        param.copy_(part.view(param.shape))


@torch.no_grad()
def test_accuracy(model: nn.Module, settings: ServerSettings) -> float:
    """The share of right answers for the first `TESTED` images of the test set."""
    images, labels = Images(settings.folder, "t10k", TESTED).span(0, TESTED)
    images = images.to(device(), torch.get_default_dtype())
    return (model.eval()(images).argmax(1).cpu() == labels).double().mean().item()
