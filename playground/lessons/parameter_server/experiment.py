"""The same training by all-reduce, and by a server in every mode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
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
from playground.remote.agent import Agent
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.training.replicas import flat


def run(rank: int, size: int, settings: ServerSettings) -> list[Fields]:
    """Train by all-reduce, then by a server in every mode. The server's rank returns the result of each."""
    require_same_on_all_ranks(settings.on_all_ranks())
    workers = dist.new_group(list(range(1, size)))
    with Agent() as agent:
        by_all_reduce: list[Any] = [None if rank == SERVER else train_by_all_reduce(workers, settings)]
        dist.broadcast_object_list(by_all_reduce, src=SERVER + 1)
        result, parameters = by_all_reduce[0]
        if rank == SERVER:
            return [result, *(serve_mode(agent, mode, size - 1, settings, parameters) for mode in settings.modes)]
        for _ in settings.modes:
            agent.barrier()
            train_with_server(agent, workers, settings)
    return []


def serve_mode(
    agent: Agent, mode: str, workers: int, settings: ServerSettings, early_parameters: torch.Tensor
) -> Fields:
    """Make the server, announce it, and wait. Other threads answer the workers' calls. `early_parameters`: the
    parameters after the first few steps without a server, to compare with."""
    server = MeasuredServer(new_model(settings), mode, workers, settings)
    servers[:] = [server]
    agent.barrier()
    server.join()
    return server.result(early_parameters)


def train_by_all_reduce(workers: Any, settings: ServerSettings) -> tuple[Fields, torch.Tensor]:
    """Train on every worker. Returns the result (its bytes are those of a ring), and the early parameters."""
    model, size = new_model(settings), dist.get_world_size(workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    coming = whole_batches(settings, workers)
    images, labels, _ = next(whole_batches(settings, workers))
    F.nll_loss(new_model(settings)(images), labels).backward()  # a gradient that is not used: the first takes longer
    started, losses = time.perf_counter(), list[tuple[float, int]]()
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


def summarize(mode: str, seconds: float, losses: Sequence[tuple[float, int]], **about: Any) -> Fields:
    """The result of a mode. `losses`: of each gradient its samples' summed loss, and their number. `last_loss` is the
    mean over the samples of the last tenth of the gradients, with dropout on."""
    samples, last = sum(count for _, count in losses), losses[-ceil(len(losses) / 10) :]
    last_loss = sum(loss for loss, _ in last) / sum(count for _, count in last)
    return {
        "mode": mode, "seconds": seconds, "samples": samples, "speed": samples / seconds, "last_loss": last_loss,
        **about,
    }  # fmt: skip


class MeasuredServer(ParameterServer):
    """A server that keeps account of what it takes, how old that is, and what it sends."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        super().__init__(model, mode, workers, settings)
        self.started, self.heartbeat = time.perf_counter(), Heartbeat()
        self.seconds, self.losses = 0.0, list[tuple[float, int]]()
        self.staleness: Counter[int] = Counter()
        self.bytes = 0
        """Bytes sent and received."""
        self.early = flat(model.parameters()).cpu()
        """The parameters after the gradients of `settings.early_steps` steps."""

    def take(self, push: Push) -> None:
        self.bytes += push.gradient.nbytes
        self.staleness[self.version - push.version] += 1
        self.losses.append((push.loss, push.samples))
        self.seconds = time.perf_counter() - self.started
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
        `bytes_per_step` are those that the busiest rank sends and receives for a gradient of every worker.
        """
        return summarize(
            self.mode,
            self.seconds,
            self.losses,
            staleness=dict(sorted(self.staleness.items())),
            gradients_by_worker=self.taken,
            bytes_per_step=round(self.bytes / self.settings.steps),
            difference_to_all_reduce=(self.early - early_by_all_reduce).abs().max().item(),
        )
