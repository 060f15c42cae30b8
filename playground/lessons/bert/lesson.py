"""BERT on sentence pairs, the workload of the tutorials: three ways to train it on several devices.

    python -m playground bert
    python -m playground bert --way ddp -n 4
    python -m playground bert --weights bert-base-cased --dataset multinli

Does a premise entail a hypothesis, contradict it, or neither? `data_parallel` gathers the replicas' logits on the first
device, `loss_in_forward` gathers one loss per device, and with `ddp` each rank has a replica of its own. All three take
the same batches, so their losses are the same.
Without a network and a GPU the model is small and starts from scratch, and a grammar writes the sentences.
What each way costs in memory, time and messages: the other files of this folder.
Source: Devlin et al., BERT, 2019, arXiv 1810.04805; Williams et al., MultiNLI, 2018, arXiv 1704.05426
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.bert.page import BertSettings
from playground.lessons.bert.pairs import PairBatch, Pairs
from playground.lessons.bert.pretrained import SCRATCH, load_encoder
from playground.lessons.data_parallel.lesson import ParallelLossModel, chunk_sizes, weighted_mean
from playground.lessons.data_parallel.machine import DataParallel
from playground.measurement import Fields
from playground.measurement.interleave import Heartbeat
from playground.runtime import device, synchronize
from playground.training.bert import Model
from playground.training.replicas import find_largest_difference

LossFunction = Callable[[PairBatch], torch.Tensor]
TEST_BATCH = 100


def loss_of_logits(model: nn.Module, batch: PairBatch) -> torch.Tensor:
    logits = model(*batch.inputs)
    return F.cross_entropy(logits, batch.labels)


def data_parallel(settings: BertSettings) -> tuple[Any, LossFunction]:
    """Each device computes the logits of its part of the batch. They come together on the first device, which alone
    computes the loss."""
    model = DataParallel(build_model(settings), settings.devices)
    return model, partial(loss_of_logits, model)


def loss_in_forward(settings: BertSettings) -> tuple[Any, LossFunction]:
    """Each device computes the loss of its part of the batch, and only these come together: one number per device."""
    model = DataParallel(ParallelLossModel(build_model(settings), nn.CrossEntropyLoss()), settings.devices)

    def loss(batch: PairBatch) -> torch.Tensor:
        losses = model(*batch)
        return weighted_mean(losses, chunk_sizes(len(batch.labels), len(settings.devices)))

    return model, loss


def ddp(settings: BertSettings) -> tuple[Any, LossFunction]:
    """Each rank computes the loss of its own batch, and backward averages the gradients over the ranks."""
    model = DistributedDataParallel(build_model(settings))
    return model, partial(loss_of_logits, model)


WAYS = {"data-parallel": data_parallel, "loss-in-forward": loss_in_forward, "ddp": ddp}
"""Each wraps a model, and gives a function from a batch to its mean loss; with ddp, from this rank's part of it."""


def train(rank: int, size: int, settings: BertSettings) -> Fields:
    """Train by each way, on the same batches, then test.

    Every rank returns the same figures.
    """
    model, losses, seconds = take_all_steps(rank, size, settings)
    trained = getattr(model.module, "model", model.module)  # without the loss in its forward
    right, tested = test(trained, settings, rank, size)
    speed = settings.steps * settings.batch_size / seconds
    found = {"losses": losses, "seconds": seconds, "samples_per_second": speed, "test_accuracy": right / tested}
    about = {"way": settings.way, "workers": settings.workers, "tested": tested}
    return {**about, **found, "replicas_max_difference": find_largest_difference(model)[0]}


def take_all_steps(rank: int, size: int, settings: BertSettings) -> tuple[Any, list[float], float]:
    """The trained model, the loss of all ranks together before each step, and the seconds that the steps took."""
    model, loss_of, optimizer = prepare(settings)
    parts, heartbeat = list[torch.Tensor](), Heartbeat()
    torch.manual_seed(settings.seed + 1 + rank)  # from here on, other dropout masks on every rank
    synchronize()
    started = time.monotonic()
    for batch in itertools.islice(batches(settings, rank, size), settings.steps):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        parts.append(loss.detach())
        heartbeat.beat(phase=f"training: {settings.way}", step=len(parts), steps=settings.steps)
    losses = torch.stack(parts).double() / size
    dist.all_reduce(losses)
    return model, losses.tolist(), time.monotonic() - started  # the list waits for the device


def prepare(settings: BertSettings) -> tuple[Any, LossFunction, torch.optim.Optimizer]:
    """A model by the way that was asked for, its loss, and Adam."""
    torch.set_num_threads(settings.threads)
    model, loss_of = WAYS[settings.way](settings)
    return model, loss_of, torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)


def same_losses(rank: int, size: int, settings: BertSettings) -> Fields:
    """Are all ways one training? In float64 and without dropout, the losses of every step are those of one device: what
    differs is rounding."""
    _, losses, _ = take_all_steps(rank, size, settings.exact)
    return {"way": settings.way, "workers": settings.workers, "losses": losses}


def build_model(settings: BertSettings) -> nn.Module:
    """A model with the weights that were asked for, in training mode: with dropout, if its config has any."""
    torch.manual_seed(settings.seed)
    model = Model(settings.config)
    if settings.weights != SCRATCH:
        model.bert.load_state_dict(load_encoder(settings.weights).state_dict())
    return model.to(device(), torch.float64 if settings.double else torch.float32).train()


def batches(settings: BertSettings, rank: int, size: int) -> Iterator[PairBatch]:
    """This rank's part of every global batch, without end. In every epoch
    `DistributedSampler` shuffles all samples, on every rank alike, and gives rank r each `size`-th of them from the
    r-th on. So the ranks' batches of a step are, together, what one process gets as its batch."""
    data = Pairs(settings.folder, "train")
    sampler = DistributedSampler(data, size, rank, seed=settings.seed, drop_last=True)
    loader: DataLoader[PairBatch] = DataLoader(
        data,
        batch_size=settings.batch_size // size,
        sampler=sampler,
        drop_last=True,
        collate_fn=PairBatch._make,
        pin_memory=device().type == "cuda",
        generator=torch.Generator(),  # so that it draws none of dropout's numbers
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        yield from map(partial(PairBatch.to, device=device(), non_blocking=True), loader)


def test(model: nn.Module, settings: BertSettings, rank: int, size: int) -> tuple[int, int]:
    """How many of the test pairs the model gets right, and how many there are. Each falls to exactly one rank."""
    data = Pairs(settings.folder, "test")
    right = torch.zeros((), dtype=torch.int64, device=device())
    with torch.no_grad():
        model.eval()
        for positions in torch.arange(rank, len(data), size).split(TEST_BATCH):
            batch = data.__getitems__(positions.tolist()).to(device())
            right += (model(*batch.inputs).argmax(dim=1) == batch.labels).sum()
        model.train()
    dist.all_reduce(right)
    return int(right), len(data)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
