"""The lesson's run: each way against one process, then training, with its rows and bytes counted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from playground.console.one_process import EXACT_STEPS
from playground.lessons.experts.lesson import Experts, NewExpert, Router, backward, cut_experts
from playground.lessons.experts.page import EXPERTS, WAYS, ExpertsSettings, K
from playground.lessons.tensor.lesson import GPTConfig, copying_loss, new_gpt
from playground.measurement import Fields
from playground.runtime import device
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.training.gpt_run import Backward, batches, compare, train


def run(rank: int, size: int, settings: ExpertsSettings) -> list[Fields]:
    """On this rank, by way: what was counted, and how far the way is from one process."""
    require_same_on_all_ranks(vars(settings))
    return [run_way(way, settings) for way in settings.ways]


def run_way(way: str, settings: ExpertsSettings) -> Fields:
    """Each rank trains as one process, too: to average their gradients, which are the same, changes nothing."""
    new = partial(new_training, way, settings)
    ours, alone = new(Experts, settings.size, torch.float64), new(partial(EveryToken, parts=settings.size), 1)
    found = compare(way, ours, alone, batches(settings.batch_size, EXACT_STEPS, settings.seed))
    model, step = new(Experts, settings.size, torch.float32)
    found |= train(way, model, step, batches(settings.batch_size, settings.steps, settings.seed))
    return found | count_rows([block.experts for block in model[1:-1]])


def new_training(
    way: str, settings: ExpertsSettings, layer: Any, parts: int, dtype: torch.dtype = torch.float64
) -> tuple[Any, Backward]:
    """A model, and what trains it on this rank's part of each batch, of as many `parts`."""
    model = new_gpt(GPTConfig(), settings.seed)
    cut_experts(model, EXPERTS, K, settings.seed, partial(layer, capacity=settings.capacity or math.inf))
    model.to(device(), dtype)

    def step(*batch: Tensor) -> Tensor:
        tokens, targets = (each.chunk(parts)[dist.get_rank() % parts] for each in batch)
        loss = copying_loss(model(tokens), targets)
        backward(loss + WAYS[way] * sum(block.experts.balance for block in model[1:-1]), model)
        total = loss.detach()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return model, step


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
