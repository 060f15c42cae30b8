"""The lesson's run: both ways against one process, training with and without an exchange, and attention alone, by the
length of the sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from playground.lessons.context.lesson import (
    Ring,
    cut_sequence,
    own_positions,
    ring_attention,
    score,
    ulysses_attention,
)
from playground.lessons.context.page import ALONE, LENGTHS, ORDERS, ROUNDS, WAYS, ContextSettings
from playground.lessons.tensor.experiment import CONFIG, Traffic
from playground.lessons.tensor.page import EXACT_STEPS, HEADS, LENGTH, WIDTH
from playground.measurement import Fields
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import device, report, synchronize
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.activations import ActivationCounter
from playground.training.gpt import LR, copying, new_model, set_lr


def run(rank: int, size: int, settings: ContextSettings) -> Fields:
    """On this rank: how many pairs it has computed, attention by length, and training by way."""
    require_same_on_all_ranks(vars(settings))
    exact = partial(train, settings=settings, steps=EXACT_STEPS, dtype=torch.float64)
    expected, ways = exact(None)[:2], dict[str, Fields]()
    for way in WAYS:
        *_, ways[way] = train(way, settings, settings.steps)
        for what, one, own in zip(
            ("losses", "parameters"), expected, exact(way)[:2] if way != ALONE else (), strict=False
        ):
            ways[way][f"{what}_difference"] = (own - one).abs().max().item()
    pairs = {order: sum(count for *_, count in rows) for order, rows in computed_pairs(rank, size, LENGTH).items()}
    return {"pairs": pairs, "lengths": [measure(length, size) for length in LENGTHS], "ways": ways}


def backward(model: nn.Module, tokens: Tensor, targets: Tensor, mine: Tensor) -> Tensor:
    """The gradients of this rank's summand of the mean loss, which it returns. The mean is over the targets of all
    ranks, of which one may have none. Tokens and targets are whole; `mine` are this rank's positions."""
    logits = model(tokens[:, mine])
    total = F.cross_entropy(logits.flatten(0, 1), targets[:, mine].flatten(), reduction="sum")
    loss = total / (targets >= 0).sum()
    loss.backward()
    return loss.detach()


def add_up_gradients(model: nn.Module) -> None:
    """A sum, and no mean, over the ranks: each has seen its own tokens of the same sequences."""
    gradients = [param.grad for param in model.parameters()]
    total = parameters_to_vector(gradients)
    dist.all_reduce(total)
    vector_to_parameters(total, gradients)


def train(
    way: str | None, settings: ContextSettings, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Fields]:
    """Train by a way, or as one process. Returns all losses, the parameters, and what was counted in the first step."""
    model, mine = new_model(CONFIG, settings.seed).to(device(), dtype), torch.arange(LENGTH)
    if way:
        zigzag = way != "ulysses"
        mine = own_positions(LENGTH, settings.size, dist.get_rank(), zigzag)
        cut_sequence(model, zigzag=zigzag, way="ring" if way == ALONE else way)
    for block in model[1:-1] if way == ALONE else ():
        del block.attention.attend  # the class's is local: causal, as own positions are in order
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=LR), torch.Generator().manual_seed(settings.seed)
    losses, seconds = list[Tensor](), list[float]()

    def take_step(step: int) -> None:
        report(phase=f"{way or 'one process'}: training", step=step, steps=steps)
        tokens, targets = (each.to(device()) for each in copying(settings.batch_size, generator))
        start = time.perf_counter()
        set_lr(optimizer, step)
        optimizer.zero_grad()
        losses.append(backward(model, tokens, targets, mine))
        if way:
            add_up_gradients(model)
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - start)

    traffic, activations = Traffic(), ActivationCounter(model)
    with observing(traffic), activations:
        take_step(0)
    for step in range(1, steps):
        take_step(step)
    total = torch.stack(losses)
    if way:
        dist.all_reduce(total)
    counted = {"sent": traffic.sent, "kept": activations.peak, "calls": dict(traffic.calls)}
    figures = {"step_seconds": median(seconds[1:] or seconds), "first": total[0].item(), "last": total[-1].item()}
    return total, parameters_to_vector(model.parameters()).detach(), counted | figures


def measure(length: int, size: int) -> Fields:
    """Attention alone, forward and backward: bytes that the ring sends and keeps, those that one process keeps if it
    stores the square, and the seconds of the ring, in both orders, and of Ulysses."""
    whole, own = (
        torch.randn(3, 1, HEADS, tokens, WIDTH // HEADS, device=device(), requires_grad=True)
        for tokens in (length, length // size)
    )
    traffic, kept, square = Traffic(), ActivationCounter(nn.Module()), ActivationCounter(nn.Module())
    with observing(traffic), kept:
        ring_attention(*own).sum().backward()
    with square:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        (score(whole[0], whole[1], hidden).softmax(-1) @ whole[2]).sum()
    calls = {order: partial(ring_attention, *own, None, zigzag) for order, zigzag in ORDERS.items()}
    calls["ulysses"] = partial(ulysses_attention, *own)
    turns = interleave([timed(partial(finish, call)) for call in calls.values()], range(ROUNDS), Random(length))
    counted = {"length": length, "square": square.peak, "kept": kept.peak, "sent": traffic.sent}
    return counted | dict(zip(calls, map(min, map(slowest, turns)), strict=True))


def finish(attention: Callable[[], Tensor]) -> None:
    attention().sum().backward()


def computed_pairs(rank: int, size: int, length: int) -> dict[str, list[tuple[int, int, int]]]:
    """By order, the rows of what this rank computes: a query's position, that of the first key, and how many keys."""
    found = {order: list[tuple[int, int, int]]() for order in ORDERS}
    for order, zigzag in ORDERS.items():
        ring = Ring(length // size, None, zigzag, causal=True)
        for source in range(size):
            for rows, columns, hidden in ring.pairs(source):
                keys = ring.positions[source][columns]
                for row, query in enumerate(ring.positions[rank][rows].tolist()):
                    visible = len(keys) if hidden is None else int((~hidden[row]).sum())
                    found[order].append((query, int(keys[0]), visible))
    return found
