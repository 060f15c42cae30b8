"""The lesson's run: each way against one process, then training, with its rows and bytes
counted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from playground.lessons.experts.lesson import DenseExperts, Experts, backward, replace_mlps
from playground.lessons.experts.page import EXPERTS, WAYS, ExpertsSettings, ExpertsTraining, K
from playground.lessons.tensor.lesson import GPTConfig, copying_loss, new_gpt
from playground.runtime import device
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.training.gpt_run import Backward, batches, compare, train
from playground.training.one_process import EXACT_STEPS


def run(rank: int, size: int, settings: ExpertsSettings) -> list[ExpertsTraining]:
    """This rank's training by each way."""
    require_same_on_all_ranks(vars(settings))
    return [run_way(way, settings) for way in settings.ways]


def run_way(way: str, settings: ExpertsSettings) -> ExpertsTraining:
    """Each rank trains as one process, too: to average their gradients, which are the same, changes
    nothing."""
    new = partial(new_training, way, settings)
    ours = new(Experts, settings.size, torch.float64)
    alone = new(partial(DenseExperts, parts=settings.size), 1)
    exact = batches(settings.batch_size, EXACT_STEPS, settings.seed)
    differences = compare(way, ours, alone, exact)
    model, step = new(Experts, settings.size, torch.float32)
    found = train(way, model, step, batches(settings.batch_size, settings.steps, settings.seed))

    layers = [block.experts for block in model[1:-1]]
    before = torch.stack([layer.before_capacity for layer in layers])  # [blocks, ranks, experts]
    after = torch.stack([layer.after_capacity for layer in layers])
    rank = dist.get_rank()
    computed = after.tensor_split(settings.size, dim=2)[rank]
    staying = int(computed[:, rank].sum())
    per_expert = before.sum(1).double()
    return ExpertsTraining(
        **vars(found),
        **vars(differences),
        dropped=int((before - after)[:, rank].sum()),
        sent_tokens=int(after[:, rank].sum()) - staying,
        received_tokens=int(computed.sum()) - staying,
        computed=int(computed.sum()),
        most_over_mean=(per_expert.amax(1) / per_expert.mean(1)).mean().item(),
        after_capacity=after.tolist(),
    )


def new_training(
    way: str, settings: ExpertsSettings, layer: Any, parts: int, dtype: torch.dtype = torch.float64
) -> tuple[Any, Backward]:
    """A model, and what trains it on this rank's part of each batch, of as many `parts`."""
    model = new_gpt(GPTConfig(), settings.seed)
    layers = replace_mlps(
        model, EXPERTS, K, settings.seed, partial(layer, capacity=settings.capacity or math.inf)
    )
    model.to(device(), dtype)

    def step(*batch: Tensor) -> Tensor:
        tokens, targets = (each.chunk(parts)[dist.get_rank() % parts] for each in batch)
        loss = copying_loss(model(tokens), targets)
        backward(loss + WAYS[way] * sum(layer.balance_loss for layer in layers), model)
        total = loss.detach()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return model, step
