"""What every worker trains with, by a server or by all-reduce: the model, its part of the batches, its pace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.parameter_server.page import ServerSettings
from playground.runtime import device, synchronize
from playground.training.data import Images, batches, partition_dataset
from playground.training.net import Net


def new_model(settings: ServerSettings) -> nn.Module:
    """The model, equal on every rank."""
    torch.manual_seed(settings.seed)
    return Net().to(device(), memory_format=torch.channels_last)


def whole_batches(settings: ServerSettings, workers: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """This worker's (images, labels, samples per worker) of every global batch, without end.

    All batches are whole, so that all gradients count alike. From here on, every worker has dropout masks of its own.
    """
    samples = len(Images(settings.folder, "train", settings.limit)) // settings.batch_size * settings.batch_size
    train_set, _ = partition_dataset(
        Images(settings.folder, "train", samples), settings.batch_size, settings.seed, group=workers
    )
    torch.manual_seed(settings.seed + 1 + dist.get_rank(workers))
    while True:
        for images, labels, samples_per_worker in batches(train_set, settings.batch_size, group=workers):
            yield images.to(torch.get_default_dtype()), labels, samples_per_worker


def warm_up(settings: ServerSettings, workers: Any) -> None:
    """Compute a gradient for nothing: the first one takes longer."""
    images, labels, _ = next(whole_batches(settings, workers))
    F.nll_loss(new_model(settings)(images), labels).backward()


@contextlib.contextmanager
def paced(settings: ServerSettings, workers: Any) -> Iterator[None]:
    """Let what stands in the `with` take the last worker `settings.slow_worker` times as long."""
    synchronize()
    started = time.perf_counter()
    yield
    if dist.get_rank(workers) == dist.get_world_size(workers) - 1:
        synchronize()
        time.sleep((settings.slow_worker - 1) * (time.perf_counter() - started))
