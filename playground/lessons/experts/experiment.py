"""The lesson's run: each way against one process, then training, with its rows and bytes counted."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.experts.lesson import Experts, NewExpert, Router, backward, cut_experts
from playground.lessons.experts.page import (
    EXACT_STEPS,
    EXPERTS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WAYS,
    WIDTH,
    ExpertsSettings,
    K,
)
from playground.measurement import Fields
from playground.runtime import device, report, synchronize
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.gpt import LR, GPTConfig, copying, copying_loss, new_model, set_lr
from playground.training.traffic import Traffic

CONFIG = GPTConfig(layers=LAYERS, width=WIDTH, length=LENGTH, vocabulary=VOCABULARY)


def run(rank: int, size: int, settings: ExpertsSettings) -> list[Fields]:
    """On this rank, by way: what was counted, and how far the way is from one process."""
    require_same_on_all_ranks(vars(settings))
    return [{**compare(way, settings), **train(way, settings)} for way in settings.ways]


class EveryToken(nn.Module):
    """The same layer in one process: every expert computes every token, and its result weighs 0 where it was not chosen
    or has dropped the row. The tokens come in `parts`, each of which has its own capacity."""

    def __init__(self, router: Router, new_expert: NewExpert, capacity: float, parts: int) -> None:
        super().__init__()
        self.router, self.capacity, self.parts = router, capacity, parts
        self.experts = nn.ModuleDict({str(number): new_expert(number) for number in range(router.scores.out_features)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, experts = hidden.flatten(0, -2), len(self.experts)
        probabilities, weights, chosen = self.router(tokens)
        wanted = F.one_hot(chosen, experts)  # [tokens, k, experts]
        self.balance = experts * (wanted.flatten(0, 1).to(tokens).mean(0) * probabilities.mean(0)).sum()
        places = torch.cat([part.flatten(0, 1).cumsum(0).view_as(part) for part in wanted.chunk(self.parts)])
        kept = wanted * (places < self.capacity * chosen.numel() / self.parts / experts + 1)
        outputs = torch.stack([expert(tokens) for expert in self.experts.values()], 1)  # [tokens, experts, width]
        return ((weights.unsqueeze(-1) * kept).sum(1).unsqueeze(-1) * outputs).sum(1).view_as(hidden)


def steps(way: str, settings: ExpertsSettings, layer: Any, parts: int, dtype: torch.dtype) -> Iterator[Any]:
    """Steps of training on this rank's part of each batch, of as many `parts`: the model and the loss after each."""
    model, generator = new_model(CONFIG, settings.seed), torch.Generator().manual_seed(settings.seed)
    cut_experts(model, EXPERTS, K, settings.seed, partial(layer, capacity=settings.capacity or math.inf))
    optimizer = torch.optim.AdamW(model.to(device(), dtype).parameters(), lr=LR)
    for step in itertools.count():
        report(phase=f"{way}: training", step=step, steps=settings.steps)
        set_lr(optimizer, step)
        optimizer.zero_grad()
        batch = copying(settings.batch_size, generator)
        tokens, targets = (each.chunk(parts)[dist.get_rank() % parts].to(device()) for each in batch)
        loss = copying_loss(model(tokens), targets)
        backward(loss + WAYS[way] * sum(block.experts.balance for block in model[1:-1]), model)
        optimizer.step()
        yield model, loss.detach()


def mean(values: torch.Tensor) -> torch.Tensor:
    """Of all ranks."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


def compare(way: str, settings: ExpertsSettings) -> Fields:
    """The largest difference of any loss and parameter from one process's, after steps of AdamW in float64. Each rank
    trains as one process, too: to average their gradients, which are the same, changes nothing."""
    one = steps(way, settings, partial(EveryToken, parts=settings.size), 1, torch.float64)
    ranks, losses = steps(way, settings, Experts, settings.size, torch.float64), []
    for _ in range(EXACT_STEPS):
        (whole, expected), (model, loss) = next(one), next(ranks)
        losses.append((mean(loss) - expected).abs().item())
    params = dict(whole.named_parameters())
    differences = [(param - params[name]).abs().max().item() for name, param in model.named_parameters()]
    return {"loss_difference": max(losses), "parameter_difference": max(differences)}


def train(way: str, settings: ExpertsSettings) -> Fields:
    """Train in float32, and count: in step `seen_step`, rows and what is exchanged; seconds of all but the first."""
    losses, seconds, traffic, counted = list[torch.Tensor](), list[float](), Traffic(), Fields()
    training = steps(way, settings, Experts, settings.size, torch.float32)
    for step in range(settings.steps):
        start, sees = time.perf_counter(), step == settings.seen_step
        with observing(traffic) if sees else contextlib.nullcontext():
            model, loss = next(training)
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        if sees:
            counted = count_rows([block.experts for block in model[1:-1]])
    everyones = mean(torch.stack(losses)).tolist()
    return counted | {
        "messages": sum(traffic.calls.values()),
        "sent": traffic.sent,
        "calls": dict(traffic.calls),
        "step_seconds": median(seconds[1:] or seconds),
        "losses": everyones,
        "first": everyones[0],
        "last": everyones[-1],
    }


def count_rows(layers: list[Any]) -> Fields:
    """Rows of the last forward, in all layers; the fullest expert over the mean, the mean over layers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted, kept = (torch.stack([getattr(layer, table) for layer in layers]) for table in ("wanted", "kept"))
    here, of_expert = kept.tensor_split(size, 2)[rank], wanted.sum(1).double()
    staying, computed = int(here[:, rank].sum()), int(here.sum())
    return {
        "dropped": int((wanted - kept)[:, rank].sum()),
        "sent_rows": int(kept[:, rank].sum()) - staying,
        "received_rows": computed - staying,
        "computed": computed,
        "most_over_mean": (of_expert.amax(1) / of_expert.mean(1)).mean().item(),
        "kept": kept.tolist(),
    }
