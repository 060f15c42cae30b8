"""A mixture of experts over ranks: a router sends each token to a few of many MLPs, wherever they are.

    python -m playground experts
    python -m playground experts -n 4 --way balanced

A block has several MLPs in the place of one, the experts, a part of them on each rank. A router, which all ranks have,
chooses k of them for each token; a row is one token's hidden vector on its way to one expert. Each rank has its own
tokens, as in data parallelism, so rows travel:

    dispatch    sort rows by expert, all_to_all_single to the experts' ranks
    compute     sort what came by own expert, apply each, restore the order
    combine     all_to_all_single back, add up a token's k results by weight

The router decides in every step how many rows go where: splits are uneven, and may be 0. In backward, gradients take
the same ways, with the splits swapped.
Sources: Shazeer et al., 2017, arXiv 1701.06538; Lepikhin et al., GShard, 2020, arXiv 2006.16668 (ranks, capacity);
Fedus et al., Switch Transformers, 2021, arXiv 2101.03961 (the balance loss)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

NewExpert = Callable[[int], nn.Module]
"""Makes the expert of a number."""


class Router(nn.Module):
    """Chooses `k` of the experts for each token: those with the highest probabilities."""

    def __init__(self, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.scores, self.k = nn.Linear(width, experts, bias=False), k

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [tokens, width] → probabilities [tokens, experts], and of the chosen experts their weights, which add
        up to 1, and their numbers, both [tokens, k]."""
        probabilities = self.scores(tokens).softmax(-1)
        highest, chosen = probabilities.topk(self.k)
        return probabilities, highest / highest.sum(-1, keepdim=True), chosen


class AllToAll(torch.autograd.Function):
    """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1, …; the first `received[0]` of the result are
    from rank 0, …. Gradients go back where their rows came from."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *splits: Any) -> torch.Tensor:
        context.sent, context.received, context.group = splits
        return exchange(rows, *splits)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(gradient, context.received, context.sent, context.group), None, None, None


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class Experts(nn.Module):
    """A layer of experts, of which the ranks of `group` (all, by default) have about as many each, one part after the
    other; `experts` are those of this rank, by number. `capacity`: rows that a rank sends to one expert, at most, as a
    multiple of the mean; more are dropped.

    After a forward, `wanted` and `kept` are tables [ranks, experts] of the rows that a rank has for an expert, before
    and after dropping, the same on all ranks; `balance` is the balance loss. Ranks may have different numbers of
    tokens, or none. Raises `ValueError` for fewer experts than ranks, and for a negative capacity."""

    def __init__(
        self, router: Router, new_expert: NewExpert, capacity: float = math.inf, group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.router, self.capacity, self.group = router, capacity, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if router.scores.out_features < self.size:
            few = f"{router.scores.out_features} experts for {self.size} ranks"
            raise ValueError(f"{few}: each rank needs one, so choose at least {self.size} experts")
        if not capacity >= 0:
            raise ValueError(f"capacity {capacity}: it must be 0 or above; math.inf drops no row")
        numbers = torch.arange(router.scores.out_features).tensor_split(self.size)[self.rank].tolist()
        self.experts = nn.ModuleDict({str(number): new_expert(number) for number in numbers})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, width] → the same. A dropped row adds nothing."""
        tokens = hidden.flatten(0, -2)
        probabilities, weights, chosen = self.router(tokens)
        order = self.sort_by_expert(chosen.flatten())
        self.balance = balance_loss(probabilities, self.wanted, self.router.k)

        sent = [int(part.sum()) for part in self.kept[self.rank].tensor_split(self.size)]
        coming = self.kept.tensor_split(self.size, dim=1)[self.rank]
        received = coming.sum(1).tolist()
        token = order // self.router.k
        arrived = AllToAll.apply(tokens[token], sent, received, self.group)
        results = AllToAll.apply(self.compute(arrived, coming), received, sent, self.group)
        weighted = results * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(hidden)

    def sort_by_expert(self, chosen: torch.Tensor) -> torch.Tensor:
        """The rows in the order of the experts that they have `chosen` [rows], without those that are dropped: an
        expert takes the first ones. Tells all ranks how many rows there are for each."""
        expert, order = chosen.sort(stable=True)
        counts = chosen.bincount(minlength=self.router.scores.out_features)
        wanted = counts.new_empty(self.size * len(counts))
        dist.all_gather_into_tensor(wanted, counts, group=self.group)
        self.wanted = wanted.view(self.size, -1).cpu()  # on a GPU, the host waits here: it must know the splits
        mean = self.wanted.double().mean(1, keepdim=True)
        most = self.capacity * mean.clamp(min=1 / len(counts))  # inf · 0, of a rank without rows, would be NaN
        self.kept = self.wanted.minimum(most.ceil()).long()
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert]
        return order[place < self.kept[self.rank].to(order.device)[expert]]

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply this rank's experts to rows [rows, width], which come rank by rank, and those of a rank by expert;
        `counts` [ranks, own experts]. An expert without rows is called as well: its gradient is zero, not None."""
        expert = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
        order = expert.argsort(stable=True).to(rows.device)
        parts = rows[order].split(counts.sum(0).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        return results[order.argsort()]


def balance_loss(probabilities: torch.Tensor, wanted: torch.Tensor, k: int) -> torch.Tensor:
    """The number of experts times Σ share · probability: the share of all ranks' rows that an expert gets, and its mean
    probability on this rank. 1 where all experts get as many; the mean over ranks is the loss of one process. (So the
    mean is that of this rank's tokens only if all have as many: it is their sum over the ranks' mean number.)"""
    rows = wanted.sum().clamp(min=1).double()
    share, mean = (wanted.sum(0) / rows).to(probabilities), probabilities.sum(0) * (len(wanted) * k / rows)
    return len(share) * (share * mean).sum()


def cut_experts(model: nn.Sequential, experts: int, k: int, seed: int, layer: Any = Experts) -> None:
    """Put a mixture of experts in the place of the MLP of each block of a GPT: k of them have as many features as it.
    Each draws its parameters from a generator of its own, so that they are the same wherever it is. `layer` makes a
    mixture of a router and a `NewExpert`: `Experts`, or partial(Experts, capacity=…, group=…)."""
    for number, block in enumerate(model[1:-1], start=1):
        width, features, first = block.up.in_features, block.up.out_features // k, 1000 * seed + 100 * number
        router = draw(Router(width, experts, k), first + experts)
        block.experts = layer(router, partial(new_expert, width, features, first)).to(block.up.weight)
        block.mlp = block.experts.forward
        del block.up, block.down


def new_expert(width: int, features: int, seed: int, number: int) -> nn.Module:
    return draw(nn.Sequential(nn.Linear(width, features), nn.GELU(), nn.Linear(features, width)), seed + number)


def draw(module: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        nn.init.normal_(param, std=0.05, generator=generator)
    return module


def backward(loss: torch.Tensor, model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Compute the gradients of the mean of all ranks' losses. An expert has seen the rows of all ranks: its gradients
    are complete. All other parameters know the tokens of this rank alone: theirs are added up."""
    (loss / dist.get_world_size(group)).backward()
    complete = {param for each in model.modules() if isinstance(each, Experts) for param in each.experts.parameters()}
    others = [param for param in model.parameters() if param not in complete]
    total = torch.cat([param.grad.flatten() for param in others])
    dist.all_reduce(total, group=group)
    for param, gradient in zip(others, total.split([param.numel() for param in others]), strict=True):
        param.grad = gradient.view_as(param)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
