"""The lesson's run: both ways against one process, training with and without an exchange, and
attention alone, by the length of the sequence."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from playground.algorithms.traffic import Traffic
from playground.lessons.context import lesson
from playground.lessons.context.lesson import position_ids, shard_sequence, tiles
from playground.lessons.context.page import (
    ALONE,
    ORDERS,
    ROUNDS,
    WAYS,
    AttentionCost,
    ContextResult,
    ContextSettings,
)
from playground.lessons.memory.lesson import Activations
from playground.lessons.tensor.lesson import GPTConfig, new_gpt
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import device
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.gpt_config import HEADS, LENGTH, WIDTH
from playground.training.gpt_run import Backward, backward_alone, batches, compare, train
from playground.training.one_process import EXACT_STEPS, ComparedTraining, Training


def run(rank: int, size: int, settings: ContextSettings) -> ContextResult:
    """On this rank: how many pairs it has computed, attention by length, and training by way."""
    require_same_on_all_ranks(vars(settings))
    pairs = {
        order: sum(count for *_, count in rows)
        for order, rows in computed_pairs(rank, size, LENGTH).items()
    }
    lengths = [measure(length, size) for length in settings.lengths]
    return ContextResult(pairs, lengths, {way: run_way(way, settings) for way in WAYS})


def run_way(way: str, settings: ContextSettings) -> Training:
    model, step = new_training(way, settings)
    whole = batches(settings.batch_size, settings.steps, settings.seed)
    found = train(way, model, step, whole)
    if way == ALONE:
        return found
    alone = new_gpt(GPTConfig(), settings.seed).to(device(), torch.float64)
    exact = batches(settings.batch_size, EXACT_STEPS, settings.seed)
    ours = new_training(way, settings, torch.float64)
    differences = compare(way, ours, (alone, backward_alone(alone)), exact)
    return ComparedTraining(**vars(found), **vars(differences))


def new_training(
    way: str, settings: ContextSettings, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Backward]:
    """A model for this rank's tokens, and what trains it."""
    zigzag = way != "ulysses"
    model = new_gpt(GPTConfig(), settings.seed).to(device(), dtype)
    shard_sequence(model, None, zigzag, ATTENTION[way])
    mine = position_ids(LENGTH, dist.get_world_size(), dist.get_rank(), zigzag)
    return model, partial(lesson.backward, model, mine)


def attend_alone(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    """Attention to own tokens only, which are in order."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


ATTENTION = {
    "ring": lesson.ring_attention,
    "ulysses": lesson.ulysses_attention,
    ALONE: attend_alone,
}
"""That of each way."""


def measure(length: int, size: int) -> AttentionCost:
    whole, own = (
        torch.randn(3, 1, HEADS, tokens, WIDTH // HEADS, device=device(), requires_grad=True)
        for tokens in (length, length // size)
    )

    def compute(attention: Any, **options: bool) -> None:
        attention(*own, **options).sum().backward()

    traffic = Traffic()
    kept = Activations(nn.Module())
    square = Activations(nn.Module())
    with observing(traffic), kept:
        compute(lesson.ring_attention)
    with square:
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        (lesson.attention_scores(whole[0], whole[1], visible).softmax(-1) @ whole[2]).sum()
    calls = {
        order: partial(compute, lesson.ring_attention, zigzag=zigzag)
        for order, zigzag in ORDERS.items()
    }
    calls["ulysses"] = partial(compute, lesson.ulysses_attention)
    turns = interleave([*map(timed, calls.values())], range(ROUNDS), Random(length))
    seconds = dict(zip(calls, map(min, map(slowest, turns)), strict=True))
    return AttentionCost(
        length=length, square=square.peak, kept=kept.peak, sent=traffic.sent, **seconds
    )


def computed_pairs(rank: int, size: int, length: int) -> dict[str, list[tuple[int, int, int]]]:
    """By order, the rows of what this rank computes: a query's position, that of the first key, and
    how many keys."""
    found = {order: list[tuple[int, int, int]]() for order in ORDERS}
    for order, zigzag in ORDERS.items():
        positions = [position_ids(length, size, each, zigzag) for each in range(size)]
        for source in range(size):
            for rows, columns, visible in tiles(
                positions[rank], positions[source], zigzag, causal=True
            ):
                keys = positions[source][columns]
                for row, query in enumerate(positions[rank][rows].tolist()):
                    count = len(keys) if visible is None else int(visible[row].sum())
                    found[order].append((query, int(keys[0]), count))
    return found
