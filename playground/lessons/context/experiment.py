"""The lesson's run: both ways against one process, training with and without an exchange, and attention alone, by the
length of the sequence."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from playground.lessons.context import page
from playground.lessons.context.lesson import (
    Group,
    Ring,
    cut_sequence,
    own_positions,
    ring_attention,
    score,
    ulysses_attention,
)  # fmt: skip
from playground.lessons.context.page import ALONE, HEADS, LENGTH, ORDERS, WIDTH, ContextSettings
from playground.measurement import Fields
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import device, report, synchronize
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.activations import ActivationCounter
from playground.training.gpt import LR, GPTConfig, copying, new_model, set_lr
from playground.training.traffic import Traffic

CONFIG = GPTConfig(layers=page.LAYERS, width=WIDTH, heads=HEADS, length=LENGTH, vocabulary=page.VOCABULARY)


def run(rank: int, size: int, settings: ContextSettings) -> Fields:
    """On this rank: how many pairs it has computed, attention by length, and training by way."""
    require_same_on_all_ranks(vars(settings))
    groups, ways = [dist.new_group([each]) for each in range(size)], dict[str, Fields]()
    exact = partial(train, settings=settings, steps=page.EXACT_STEPS, dtype=torch.float64)
    expected = exact(ALONE, group=groups[rank])[:2]
    for way in page.WAYS:
        *_, ways[way] = train(way, settings, settings.steps)
        if way != ALONE:
            for what, one, own in zip(("losses", "parameters"), expected, exact(way)[:2], strict=True):
                ways[way][f"{what}_difference"] = (own - one).abs().max().item()
    pairs = {order: sum(count for *_, count in rows) for order, rows in computed_pairs(rank, size, LENGTH).items()}
    return {"pairs": pairs, "lengths": [measure(length, size) for length in settings.lengths], "ways": ways}


def backward(model: nn.Module, tokens: Tensor, targets: Tensor, mine: Tensor, group: Group = None) -> Tensor:
    """This rank's summand of the mean loss, and the gradients of the mean. It is over the targets of all ranks: one may
    have none. Tokens and targets are whole; `mine` are this rank's positions."""
    logits = model(tokens[:, mine])
    total = F.cross_entropy(logits.flatten(0, 1), targets[:, mine].flatten(), reduction="sum")
    loss = total / (targets >= 0).sum()
    loss.backward()
    gradients = [param.grad for param in model.parameters()]
    together = parameters_to_vector(gradients)
    dist.all_reduce(together, group=group)  # a sum, and no mean: each rank has seen its own tokens
    vector_to_parameters(together, gradients)
    return loss.detach()


def train(
    way: str, settings: ContextSettings, steps: int, dtype: torch.dtype = torch.float32, group: Group = None
) -> tuple[Tensor, Tensor, Fields]:
    """All losses, the parameters, and figures of a training. A group of one rank that trains alone is one process."""
    model, zigzag = new_model(CONFIG, settings.seed).to(device(), dtype), way != "ulysses"
    mine = own_positions(LENGTH, dist.get_world_size(group), dist.get_rank(group), zigzag)
    cut_sequence(model, group, zigzag, "ring" if way == ALONE else way)
    for block in model[1:-1] if way == ALONE else ():
        del block.attention.attend  # the class's is local: causal, as own positions are in order
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=LR), torch.Generator().manual_seed(settings.seed)
    losses, seconds, traffic, activations = list[Tensor](), list[float](), Traffic(), ActivationCounter(model)
    with ExitStack() as counting:
        counting.enter_context(observing(traffic))
        counting.enter_context(activations)
        for step in range(steps):
            report(phase=f"{way}: training", step=step, steps=steps)
            tokens, targets = (each.to(device()) for each in copying(settings.batch_size, generator))
            start = time.perf_counter()
            set_lr(optimizer, step)
            optimizer.zero_grad()
            losses.append(backward(model, tokens, targets, mine, group))
            optimizer.step()
            synchronize()
            seconds.append(time.perf_counter() - start)
            counting.close()  # after the first step
    total = torch.stack(losses)
    dist.all_reduce(total, group=group)
    figures = {"step_seconds": median(seconds[1:] or seconds), "first": total[0].item(), "last": total[-1].item()}
    figures |= {"sent": traffic.sent, "kept": activations.peak, "calls": dict(traffic.calls)}
    return total, parameters_to_vector(model.parameters()).detach(), figures


def measure(length: int, size: int) -> Fields:
    """Attention alone, forward and backward: bytes that the ring sends and keeps, those that one process keeps if it
    stores the square, and the seconds of the ring, in both orders, and of Ulysses."""
    whole, own = (
        torch.randn(3, 1, HEADS, tokens, WIDTH // HEADS, device=device(), requires_grad=True)
        for tokens in (length, length // size)
    )

    def compute(attention: Any, **options: bool) -> None:
        attention(*own, **options).sum().backward()

    traffic, kept, square = Traffic(), ActivationCounter(nn.Module()), ActivationCounter(nn.Module())
    with observing(traffic), kept:
        compute(ring_attention)
    with square:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        (score(whole[0], whole[1], hidden).softmax(-1) @ whole[2]).sum()
    calls = {order: partial(compute, ring_attention, zigzag=zigzag) for order, zigzag in ORDERS.items()}
    calls["ulysses"] = partial(compute, ulysses_attention)
    turns = interleave([*map(timed, calls.values())], range(page.ROUNDS), Random(length))
    counted = {"length": length, "square": square.peak, "kept": kept.peak, "sent": traffic.sent}
    return counted | dict(zip(calls, map(min, map(slowest, turns)), strict=True))


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
