"""The lesson's run: each way against one process, then training, with its bytes, messages and activations counted."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from playground.console.one_process import EXACT_STEPS
from playground.lessons.tensor.lesson import GPTConfig, Ranks, backward, cut, new_gpt, vocabulary_loss
from playground.lessons.tensor.page import TensorSettings
from playground.measurement import Fields
from playground.runtime import device
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.runtime.tap import observing
from playground.training.gpt_run import Backward, backward_alone, batches, compare, train
from playground.training.traffic import SlowLink


def run(rank: int, size: int, settings: TensorSettings) -> list[Fields]:
    """On this rank, by way: what was counted, and how far the way is from one process."""
    require_same_on_all_ranks(vars(settings))
    return [run_way(way, settings) for way in settings.ways]


def part_like(ranks: Ranks, whole: Tensor, own: Tensor) -> Tensor:
    """This rank's part of a parameter, of the shape of `own`."""
    cuts = [dim for dim in range(own.dim()) if own.shape[dim] < whole.shape[dim]]
    return ranks.part_of(whole, cuts[0]) if cuts else whole


def run_way(way: str, settings: TensorSettings) -> Fields:
    ranks = Ranks(sequence=way == "sequence")

    def new_cut(dtype: torch.dtype) -> tuple[nn.Module, Backward]:
        model = new_gpt(GPTConfig(), settings.seed).to(device(), dtype)
        whole = cut(model, ranks)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = vocabulary_loss(model(tokens), targets, ranks)
            backward(loss, whole, ranks)
            return loss.detach()

        return model, step

    alone = new_gpt(GPTConfig(), settings.seed).to(device(), torch.float64)
    exact = batches(settings.batch_size, EXACT_STEPS, settings.seed)
    found: Any = compare(way, new_cut(torch.float64), (alone, backward_alone(alone)), exact, partial(part_like, ranks))
    model, step = new_cut(torch.float32)
    with observing(SlowLink(settings.link)) if settings.link else contextlib.nullcontext():
        found |= train(way, model, step, batches(settings.batch_size, settings.steps, settings.seed))
    return {**found, "parameters": sum(param.nbytes for param in model.parameters())}
