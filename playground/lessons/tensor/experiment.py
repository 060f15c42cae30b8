"""The lesson's run: each way against one process, then training, with its bytes, messages and activations counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from statistics import median

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
from torch import nn

from playground.lessons.tensor.lesson import Ranks, backward, cut, vocabulary_loss
from playground.lessons.tensor.page import EXACT_STEPS, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, TensorSettings
from playground.measurement import Fields
from playground.runtime import device, report, synchronize
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.activations import ActivationCounter
from playground.training.gpt import LR, GPTConfig, copying, copying_loss, new_model, set_lr
from playground.training.traffic import SlowLink, Traffic

CONFIG = GPTConfig(layers=LAYERS, width=WIDTH, heads=HEADS, length=LENGTH, vocabulary=VOCABULARY)


def run(rank: int, size: int, settings: TensorSettings) -> list[Fields]:
    """On this rank, by way: what was counted, and how far the way is from one process."""
    require_same_on_all_ranks(vars(settings))
    return [{**compare(way, settings), **train(way, settings)} for way in settings.ways]


def batches(settings: TensorSettings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same on every rank: tokens and targets [batch, length]."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        tokens, targets = copying(settings.batch_size, generator)
        yield tokens.to(device()), targets.to(device())


def compare(way: str, settings: TensorSettings) -> Fields:
    """The largest difference of any loss and parameter from one process's, after steps of AdamW in float64."""
    ranks, whole_model, model = (
        Ranks(sequence=way == "sequence"),
        *(new_model(CONFIG, settings.seed).to(device(), torch.float64) for _ in range(2)),
    )
    whole = cut(model, ranks)
    of_one, own = (torch.optim.AdamW(each.parameters(), lr=LR) for each in (whole_model, model))
    losses = []
    for step, (tokens, targets) in zip(range(EXACT_STEPS), batches(settings), strict=False):
        report(phase=f"{way}: comparing with one process", step=step, steps=EXACT_STEPS)
        of_one.zero_grad()
        expected = copying_loss(whole_model(tokens), targets)
        expected.backward()
        of_one.step()
        own.zero_grad()
        loss = vocabulary_loss(model(tokens), targets, ranks)
        backward(loss, whole, ranks)
        own.step()
        losses.append(abs(loss.item() - expected.item()))
    return {"loss_difference": max(losses), "parameter_difference": parameter_difference(whole_model, model, ranks)}


def parameter_difference(whole_model: nn.Module, model: nn.Module, ranks: Ranks) -> float:
    """Between this rank's parameters and the parts of one process's that they should be."""
    largest = 0.0
    for expected, param in zip(whole_model.parameters(), model.parameters(), strict=True):
        for dim in range(param.dim()):
            if param.shape[dim] < expected.shape[dim]:
                expected = ranks.part_of(expected, dim)
        largest = max(largest, (expected - param).abs().max().item())
    return largest


def train(way: str, settings: TensorSettings) -> Fields:
    """Train in float32, and count: in the first step, what is exchanged and what autograd keeps for backward; seconds
    of the others."""
    ranks, model = Ranks(sequence=way == "sequence"), new_model(CONFIG, settings.seed)
    whole = cut(model.to(device()), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    traffic, activations = Traffic(), ActivationCounter(model)
    losses, seconds = list[float](), list[float]()
    link = observing(SlowLink(settings.link)) if settings.link else contextlib.nullcontext()
    with link:
        for step, (tokens, targets) in zip(range(settings.steps), batches(settings), strict=False):
            report(phase=f"{way}: training", step=step, steps=settings.steps)
            start = time.perf_counter()
            set_lr(optimizer, step)
            optimizer.zero_grad()
            with observing(traffic) if step == 0 else contextlib.nullcontext():
                with contextlib.nullcontext() if step else activations:
                    loss = vocabulary_loss(model(tokens), targets, ranks)
                backward(loss, whole, ranks)
            optimizer.step()
            losses.append(loss.item())
            synchronize()
            seconds.append(time.perf_counter() - start)
    return {
        "parameters": sum(param.nbytes for param in model.parameters()),
        "activations": activations.peak,
        "messages": sum(traffic.calls.values()),
        "sent": traffic.sent,
        "calls": dict(traffic.calls),
        "step_seconds": median(seconds[1:] or seconds),
        "losses": losses,
        "first": losses[0],
        "last": losses[-1],
    }
