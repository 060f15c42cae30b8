"""The lesson's run: each way against one process, then training, with its rows and bytes counted."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.experts.lesson import Experts, Router, backward, cut_experts
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
    """The same layer in one process: every expert computes every token, and what it was not chosen for weighs 0. The
    tokens come in `parts`, each of which has its own capacity."""

    def __init__(self, router: Router, new_expert: Callable[[int], nn.Module], capacity: float, parts: int) -> None:
        super().__init__()
        self.router, self.capacity, self.parts = router, capacity, parts
        numbers = range(router.scores.out_features)
        self.experts = nn.ModuleDict({str(number): new_expert(number) for number in numbers})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, experts = hidden.flatten(0, -2), len(self.experts)
        probabilities, weights, chosen = self.router(tokens)
        wanted = F.one_hot(chosen, experts)  # [tokens, k, experts]
        self.balance = experts * (wanted.flatten(0, 1).to(tokens).mean(0) * probabilities.mean(0)).sum()
        places = [part.flatten(0, 1).cumsum(0).view_as(part) for part in wanted.chunk(self.parts)]
        most = (
            math.ceil(self.capacity * chosen.numel() / self.parts / experts) if self.capacity < math.inf else math.inf
        )
        kept = wanted * (torch.cat(places) <= most)
        outputs = torch.stack([expert(tokens) for expert in self.experts.values()], 1)  # [tokens, experts, width]
        return ((weights.unsqueeze(-1) * kept).sum(1).unsqueeze(-1) * outputs).sum(1).view_as(hidden)


def new_mixture(
    settings: ExpertsSettings, layer: Callable[..., nn.Module] = Experts
) -> tuple[nn.Sequential, list[Any]]:
    """A model with `layer` in the place of its MLPs, and these layers."""
    model = new_model(CONFIG, settings.seed)
    cut_experts(model, EXPERTS, K, settings.seed, partial(layer, capacity=settings.capacity or math.inf))
    return model.to(device()), [block.experts for block in list(model)[1:-1]]


def batches(settings: ExpertsSettings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same on every rank: tokens and targets [batch, length]."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        tokens, targets = copying(settings.batch_size, generator)
        yield tokens.to(device()), targets.to(device())


def compare(way: str, settings: ExpertsSettings) -> Fields:
    """The largest difference of any loss and parameter from one process's, after steps of AdamW in float64."""
    whole, whole_layers = new_mixture(settings, partial(EveryToken, parts=settings.size))
    model, layers = new_mixture(settings)
    of_one, own = (torch.optim.AdamW(each.double().parameters(), lr=LR) for each in (whole, model))
    losses = []
    for step, (tokens, targets) in zip(range(EXACT_STEPS), batches(settings), strict=False):
        report(phase=f"{way}: comparing with one process", step=step, steps=EXACT_STEPS)
        of_one.zero_grad()
        expected = copying_loss(whole(tokens), targets) + WAYS[way] * sum(each.balance for each in whole_layers)
        expected.backward()
        of_one.step()
        own.zero_grad()
        loss = copying_loss(model(part_of(tokens)), part_of(targets)) + WAYS[way] * sum(each.balance for each in layers)
        backward(loss, model)
        own.step()
        losses.append(abs(mean(loss.detach()).item() - expected.item()))
    expected_params = dict(whole.named_parameters())
    differences = [(param - expected_params[name]).abs().max().item() for name, param in model.named_parameters()]
    return {"loss_difference": max(losses), "parameter_difference": max(differences)}


def part_of(batch: torch.Tensor) -> torch.Tensor:
    """This rank's sequences."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def mean(values: torch.Tensor) -> torch.Tensor:
    """Of all ranks."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


def train(way: str, settings: ExpertsSettings) -> Fields:
    """Train in float32, and count: in step `seen_step`, rows and what is exchanged; seconds of all but the first."""
    model, layers = new_mixture(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    traffic, computed = Traffic(), list[int]()
    losses, seconds, counted = list[torch.Tensor](), list[float](), Fields()
    for layer in layers:
        for expert in layer.experts.values():
            expert.register_forward_hook(lambda expert, inputs, output: computed.append(len(output)))
    for step, (tokens, targets) in zip(range(settings.steps), batches(settings), strict=False):
        report(phase=f"{way}: training", step=step, steps=settings.steps)
        start, sees = time.perf_counter(), step == settings.seen_step
        computed.clear()
        set_lr(optimizer, step)
        optimizer.zero_grad()
        with observing(traffic) if sees else contextlib.nullcontext():
            loss = copying_loss(model(part_of(tokens)), part_of(targets))
            backward(loss + WAYS[way] * sum(layer.balance for layer in layers), model)
        optimizer.step()
        losses.append(loss.detach())
        synchronize()
        seconds.append(time.perf_counter() - start)
        if sees:
            counted = {"computed": sum(computed), "fullest": max(computed), **count_rows(layers)}
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
    """The rows of the last forward, and how full the fullest expert was, the mean over blocks."""
    wanted, kept = (torch.stack([getattr(layer, table) for layer in layers]) for table in ("wanted", "kept"))
    own, of_expert = wanted[:, dist.get_rank()], wanted.sum(1).double()
    return {
        "own_rows": int(own.sum()),
        "dropped": int((own - kept[:, dist.get_rank()]).sum()),
        "kept": kept.tolist(),
        "most_over_mean": (of_expert.amax(1) / of_expert.mean(1)).mean().item(),
    }
