"""The board's training with what the command was asked for: weights, devices, data; and its
test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.distributed as dist
from torch import nn

from playground.lessons.bert import lesson as board
from playground.lessons.bert.lesson import METHODS, BertConfig, Model
from playground.lessons.bert.page import BertSettings, BertTraining, Losses
from playground.lessons.bert.pairs import PairBatch, Pairs
from playground.lessons.bert.pretrained import SCRATCH, load_encoder
from playground.lessons.data_parallel.machine import DataParallel
from playground.measurement.interleave import Heartbeat
from playground.runtime import device, synchronize
from playground.training.grad_syncs import DDP
from playground.training.memory import InBfloat16, Recomputed, change
from playground.training.replicas import find_largest_difference
from playground.training.settings import BFLOAT16

TEST_BATCH = 100


def train(rank: int, size: int, settings: BertSettings) -> BertTraining:
    """Train by each way, on the same batches, then test.

    Every rank returns the same figures.
    """
    model, losses, seconds = take_all_steps(rank, size, settings)
    right, tested = test(model.module, settings, rank, size)
    return BertTraining(
        way=settings.way,
        workers=settings.workers,
        losses=losses,
        tested=tested,
        seconds=seconds,
        samples_per_second=settings.steps * settings.batch_size / seconds,
        test_accuracy=right / tested,
        replicas_max_difference=find_largest_difference(model)[0],
    )


def take_all_steps(rank: int, size: int, settings: BertSettings) -> tuple[Any, list[float], float]:
    """The trained model, the loss of all ranks together before each step, and the seconds that the
    steps took."""
    model, loss_of = wrap_model(settings)
    torch.manual_seed(settings.seed + 1 + rank)  # from here on, other dropout masks on every rank
    synchronize()
    started = time.monotonic()
    parts = board.train(model, loss_of, watched_batches(settings, rank, size), settings.lr)
    losses = torch.stack(parts).double() / size
    dist.all_reduce(losses)
    return model, losses.tolist(), time.monotonic() - started  # the list waits for the device


def wrap_model(settings: BertSettings) -> tuple[Any, Any]:
    """A model by the way that was asked for, and how to get its loss. (torch's DataParallel has no
    virtual devices.)"""
    torch.set_num_threads(settings.threads)
    wrap, loss_of = METHODS[settings.way]
    if settings.way != DDP:
        wrap = partial(DataParallel, device_ids=settings.devices)
    return wrap(build_model(settings)), loss_of


def same_losses(rank: int, size: int, settings: BertSettings) -> Losses:
    """Are all ways one training? In float64 and without dropout, the losses of every step are those
    of one device: what differs is rounding."""
    _, losses, _ = take_all_steps(rank, size, settings.exact)
    return Losses(way=settings.way, workers=settings.workers, losses=losses)


def build_model(settings: BertSettings) -> nn.Module:
    """A model with the weights that were asked for, in training mode: with dropout, if its sizes
    have any."""
    torch.manual_seed(settings.seed)
    model = Model(BertConfig(**asdict(settings.config)))
    if settings.weights != SCRATCH:
        model.bert.load_state_dict(load_encoder(settings.weights).state_dict())
    if settings.checkpoint_activations:
        for layer in model.bert.encoder["layer"]:
            change(layer, Recomputed)
    if settings.dtype == BFLOAT16:
        change(model.bert, InBfloat16)
    return model.to(device(), torch.float64 if settings.double else torch.float32).train()


def watched_batches(settings: BertSettings, rank: int, size: int) -> Iterator[PairBatch]:
    """A batch for each step, which is reported when the next one is asked for."""
    heartbeat = Heartbeat()
    for step, batch in enumerate(islice(batches(settings, rank, size), settings.steps), 1):
        yield batch
        heartbeat.beat(phase=f"training: {settings.way}", step=step, steps=settings.steps)


def batches(settings: BertSettings, rank: int, size: int) -> Iterator[PairBatch]:
    """The board's, of the prepared pairs and on this rank's device."""
    data, pinned = Pairs(settings.folder, "train"), device().type == "cuda"
    options = {"collate_fn": PairBatch._make, "pin_memory": pinned}
    coming = board.batches(data, settings.batch_size, rank, size, settings.seed, **options)
    yield from map(partial(PairBatch.to, device=device(), non_blocking=True), coming)


def test(model: nn.Module, settings: BertSettings, rank: int, size: int) -> tuple[int, int]:
    """How many of the test pairs the model gets right, and how many there are. Each falls to
    exactly one rank."""
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
