"""Expert parallelism: a router sends each token to a few of many MLPs, which are on all ranks.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground experts
    python -m playground experts -n 4 --way balanced

In a mixture of experts, a block has several MLPs in the place of one, the experts, some of them on
each rank. A router, which all ranks have, chooses k of them for each token; a token assignment is
one token and one expert that it is sent to. Each rank has its own tokens, as in data parallelism:

    dispatch    sort tokens by expert, all_to_all_single to the experts' ranks
    compute     sort what has arrived by expert, apply each, restore the order
    combine     all_to_all_single back, add up a token's k results by weight

The router decides in every step how many tokens go where: splits are uneven, and may be 0.
Backward reverses both exchanges, with the splits swapped.
Sources: Shazeer et al., 2017, arXiv 1701.06538; Lepikhin et al., GShard, 2020, arXiv 2006.16668
(ranks, capacity); Fedus et al., Switch Transformers, 2021, arXiv 2101.03961 (the balance loss)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from playground.lessons.tensor.lesson import (
    GPTConfig,
    copying,
    copying_loss,
    new_gpt,
    sum_replicated_gradients,
)

Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks
NewExpert: TypeAlias = Callable[[int], nn.Module]  # makes the expert with this id


class Router(nn.Module):
    """Chooses `k` of the experts for each token: those with the highest probabilities."""

    def __init__(self, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, experts, bias=False)
        self.k = k

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [tokens, width] → probabilities [tokens, experts], and of the chosen experts their
        weights, which add up to 1, and their ids, both [tokens, k]."""
        probabilities = self.scores(tokens).softmax(-1)
        highest, chosen = probabilities.topk(self.k)
        return probabilities, highest / highest.sum(-1, keepdim=True), chosen


def count_tokens(chosen: Tensor, experts: int, group: Group) -> Tensor:
    """Tokens per expert, of each rank: [ranks, experts], the same on all ranks."""
    counts = chosen.flatten().bincount(minlength=experts)
    gathered = counts.new_empty(dist.get_world_size(group) * experts)
    dist.all_gather_into_tensor(gathered, counts, group=group)
    return gathered.view(-1, experts).cpu()  # on a GPU, the host waits here: it needs the splits


def apply_capacity(counts: Tensor, capacity: float) -> Tensor:
    """Tokens per expert [ranks, experts] that are not dropped: from a rank an expert takes at most
    `capacity` times the mean number of tokens per expert of that rank."""
    mean = counts.double().mean(1, keepdim=True)
    most = capacity * mean.clamp(min=1 / counts.shape[1])  # inf · 0, without tokens, would be NaN
    return counts.minimum(most.ceil()).long()


def sort_by_expert(chosen: Tensor, limits: Tensor) -> Tensor:
    """The token assignments `chosen` [assignments] in the order of their experts, as indices. An
    expert takes the first ones, as many as its limit; the others are left out."""
    expert, order = chosen.sort(stable=True)
    counts = chosen.bincount(minlength=len(limits))
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert]
    return order[place < limits.to(order.device)[expert]]


class AllToAll(torch.autograd.Function):
    """The first `inputs[0]` rows go to rank 0, the next `inputs[1]` to rank 1, …; the first
    `outputs[0]` of the result are from rank 0, …. Gradients go back, with the splits swapped."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, outputs: list[int], inputs: list[int], group: Group
    ) -> Tensor:
        ctx.way_back = inputs, outputs, group
        arrived = rows.new_empty(sum(outputs), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), outputs, inputs, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradient, *ctx.way_back), None, None, None


def splits(counts: Tensor, group: Group) -> tuple[list[int], list[int]]:
    """How many tokens this rank sends to each rank, and receives from each, by the tokens per
    expert [ranks, experts]. The experts are split over the ranks in the order of their ids."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [int(part.sum()) for part in counts[rank].tensor_split(size)]
    return sent, counts.tensor_split(size, dim=1)[rank].sum(1).tolist()


def dispatch(tokens: Tensor, order: Tensor, k: int, counts: Tensor, group: Group) -> Tensor:
    """Send tokens [tokens, width] to the ranks of their experts: assignment i is of token i // k.
    Returns what arrives [arrived, width], rank by rank, and of each rank by expert."""
    sent, received = splits(counts, group)
    return AllToAll.apply(tokens[order // k], received, sent, group)


def compute(experts: Iterable[nn.Module], arrived: Tensor, counts: Tensor) -> Tensor:
    """Apply this rank's experts to what has arrived; `counts` [ranks, own experts]. An expert
    without tokens is called as well: its gradient is then zero, not None."""
    expert = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
    order = expert.argsort(stable=True).to(arrived.device)
    parts = arrived[order].split(counts.sum(0).tolist())
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return results[order.argsort()]


def combine(
    results: Tensor, order: Tensor, weights: Tensor, counts: Tensor, group: Group
) -> Tensor:
    """Send results back to their tokens' ranks, and add up those of a token by its weights
    [tokens, k]. Returns [tokens, width]. A dropped assignment adds nothing."""
    sent, received = splits(counts, group)
    returned = AllToAll.apply(results, sent, received, group)
    weighted = returned * weights.flatten()[order].unsqueeze(1)
    output = returned.new_zeros(len(weights), returned.shape[1])
    return output.index_add(0, order // weights.shape[1], weighted)


def balance_loss(probabilities: Tensor, counts: Tensor, k: int) -> Tensor:
    """The auxiliary loss: the number of experts times Σ fraction · probability, where an expert has
    a fraction of all ranks' token assignments, and a mean probability on this rank. 1 where all
    experts get as many; the mean over ranks is the loss of one process. (So the mean is that of
    this rank's tokens only if all have as many: it is their sum over the ranks' mean number.)"""
    total = counts.sum().clamp(min=1).double()
    fraction = (counts.sum(0) / total).to(probabilities)
    mean = probabilities.sum(0) * (len(counts) * k / total)
    return len(fraction) * (fraction * mean).sum()


class Experts(nn.Module):
    """A layer of experts, split over the ranks of `group`; `experts` are those of this rank, by id.

    After a forward, `before_capacity` and `after_capacity` are the tokens per expert, of each rank
    [ranks, experts], and `balance_loss` the auxiliary loss. Ranks may have different numbers of
    tokens, or none. Raises `ValueError` for fewer experts than ranks, or a negative capacity."""

    def __init__(
        self, router: Router, new: NewExpert, capacity: float = math.inf, group: Group = None
    ) -> None:
        super().__init__()
        count, size = router.scores.out_features, dist.get_world_size(group)
        if count < size:
            rule = f"each rank needs one, so choose at least {size} experts"
            raise ValueError(f"{count} experts for {size} ranks: {rule}")
        if not capacity >= 0:
            raise ValueError(f"capacity {capacity}: it must be 0 or above; math.inf drops no token")
        self.router = router
        self.capacity = capacity
        self.group = group
        own = torch.arange(count).tensor_split(size)[dist.get_rank(group)].tolist()
        self.experts = nn.ModuleDict({str(expert): new(expert) for expert in own})

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] → the same."""
        tokens = hidden.flatten(0, -2)
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        probabilities, weights, chosen = self.router(tokens)
        self.before_capacity = count_tokens(chosen, self.router.scores.out_features, self.group)
        self.after_capacity = counts = apply_capacity(self.before_capacity, self.capacity)
        self.balance_loss = balance_loss(probabilities, self.before_capacity, self.router.k)
        order = sort_by_expert(chosen.flatten(), counts[rank])
        arrived = dispatch(tokens, order, self.router.k, counts, self.group)
        own_counts = counts.tensor_split(size, dim=1)[rank]
        results = compute(self.experts.values(), arrived, own_counts)
        return combine(results, order, weights, counts, self.group).view_as(hidden)


class DenseExperts(nn.Module):
    """The same layer in one process: every expert computes every token, and its result has weight 0
    where it was not chosen or has dropped the token. Each of `parts` of the tokens has its own
    capacity, as each rank has."""

    def __init__(
        self, router: Router, new: NewExpert, capacity: float = math.inf, parts: int = 1
    ) -> None:
        super().__init__()
        self.router = router
        self.capacity = capacity
        self.parts = parts
        count = router.scores.out_features
        self.experts = nn.ModuleDict({str(expert): new(expert) for expert in range(count)})

    def forward(self, hidden: Tensor) -> Tensor:
        tokens, experts = hidden.flatten(0, -2), len(self.experts)
        probabilities, weights, chosen = self.router(tokens)
        assigned = F.one_hot(chosen, experts)  # [tokens, k, experts]
        fraction = assigned.flatten(0, 1).to(tokens).mean(0)
        self.balance_loss = experts * (fraction * probabilities.mean(0)).sum()
        parts = assigned.chunk(self.parts)
        places = torch.cat([part.flatten(0, 1).cumsum(0).view_as(part) for part in parts])
        kept = assigned * (places < self.capacity * chosen.numel() / self.parts / experts + 1)
        weight = (weights.unsqueeze(-1) * kept).sum(1).unsqueeze(-1)  # [tokens, experts, 1]
        outputs = torch.stack([expert(tokens) for expert in self.experts.values()], 1)
        return (weight * outputs).sum(1).view_as(hidden)


def replace_mlps(
    model: nn.Sequential, experts: int, k: int, seed: int, layer: Any = Experts
) -> list[Any]:
    """Put a layer of experts in the place of the MLP of each block of a GPT, and return these
    layers. k experts have as many features as the MLP. Each draws its parameters from a generator
    of its own, so that they are the same on whichever rank. `layer`: `Experts` or `DenseExperts`,
    or a partial of one with other arguments."""
    for index, block in enumerate(model[1:-1], start=1):
        width, features = block.up.in_features, block.up.out_features // k
        first = 1000 * seed + 100 * index
        router = draw(Router(width, experts, k), first + experts)
        block.experts = layer(router, partial(new_expert, width, features, first))
        block.experts.to(block.up.weight)
        block.mlp = block.experts.forward
        del block.up, block.down
    return [block.experts for block in model[1:-1]]


def new_expert(width: int, features: int, seed: int, expert: int) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(width, features), nn.GELU(), nn.Linear(features, width))
    return draw(mlp, seed + expert)


def draw(module: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        nn.init.normal_(param, std=0.05, generator=generator)
    return module


def backward(loss: Tensor, model: nn.Module, group: Group = None) -> None:
    """Compute the gradients of the mean of all ranks' losses. An expert has seen the tokens of all
    ranks: its gradients are complete. All other parameters have seen the tokens of this rank alone:
    their gradients are added up."""
    (loss / dist.get_world_size(group)).backward()
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    complete = {param for layer in layers for param in layer.experts.parameters()}
    others = [param for param in model.parameters() if param not in complete]
    sum_replicated_gradients(others, group)


def compare(rank: int, size: int) -> None:
    """Print how far the gradients are from those of one process that has all experts and all
    tokens, and what the first block sends and receives."""
    tokens, targets = copying(4 * size, torch.Generator().manual_seed(1234))
    whole = new_gpt(GPTConfig(), 1234).double()
    layers = replace_mlps(whole, experts=8, k=2, seed=1234, layer=DenseExperts)
    loss = copying_loss(whole(tokens), targets)
    (loss + 0.02 * sum(layer.balance_loss for layer in layers)).backward()

    model = new_gpt(GPTConfig(), 1234).double()
    layers = replace_mlps(model, experts=8, k=2, seed=1234)
    loss = copying_loss(model(tokens.chunk(size)[rank]), targets.chunk(size)[rank])
    backward(loss + 0.02 * sum(layer.balance_loss for layer in layers), model)

    expected = dict(whole.named_parameters())
    pairs = [(param.grad, expected[name].grad) for name, param in model.named_parameters()]
    apart = max((one - other).abs().max() for one, other in pairs)
    sent, received = splits(layers[0].after_capacity, None)
    about = f"experts {', '.join(layers[0].experts)}: sends {sent}, receives {received} tokens"
    print(f"Rank {rank}, {about}\nRank {rank}, gradients: {apart:.10f} from one process")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compare(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
