"""The same training without a server: the workers average their gradients by all-reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.algorithms.cost_model import Task
from playground.algorithms.ring import ring_cost
from playground.lessons.parameter_server.history import LossHistory, test_accuracy
from playground.lessons.parameter_server.lesson import load_gradients
from playground.lessons.parameter_server.results import ModeResult
from playground.lessons.parameter_server.settings import ALL_REDUCE, ServerSettings
from playground.lessons.parameter_server.workers import new_model, paced, whole_batches
from playground.training.replicas import flat


def train_by_all_reduce(workers: Any, settings: ServerSettings) -> tuple[ModeResult, torch.Tensor]:
    """What every worker does. Returns what came of it (of the bytes, those of a ring), and the early parameters."""
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
    result = ModeResult(
        mode=ALL_REDUCE, seconds=history.seconds, samples=history.samples, points=history.points(),
        staleness={0: settings.steps * size}, gradients_by_worker=[settings.steps] * size,
        bytes_per_step=round(2 * ring.total.bytes / size), test_accuracy=test_accuracy(model, settings),
    )  # fmt: skip
    return result, early
