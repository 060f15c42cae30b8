"""Context parallelism: the sequence is cut over the ranks, and attention still reaches from every token to all before it.

    python -m playground context
    python -m playground context -n 4 --steps 5

Everything in a transformer but attention treats each token by itself. So each rank takes its part of the tokens, and
only attention exchanges something. Ring attention leaves the queries where they are, and sends blocks of keys and values
round the ring: a rank merges what it gets from each block, so that no rank ever has all keys. Ulysses exchanges tokens
for heads by an all_to_all, computes attention as usual, and exchanges them back.

A causal token has nothing to do with the keys behind it. If each rank has one run of tokens, rank 0 is done with the
first block, and the last rank needs all. The zigzag order gives rank r the runs r and 2N - 1 - r: all have the same work.
Sources: Liu et al., Ring Attention, 2023, arXiv 2310.01889; Brandon et al., Striped Attention, 2023, arXiv 2311.09431;
Jacobs et al., DeepSpeed Ulysses, 2023, arXiv 2309.14509; Dao et al., FlashAttention, 2022, arXiv 2205.14135
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.training.gpt import Attention, Embed


def own_positions(length: int, size: int, rank: int, zigzag: bool) -> torch.Tensor:
    """The positions [length / N] of this rank's tokens: run `rank` of N, or, in zigzag, runs r and 2N - 1 - r of 2N.

    Raises `ValueError` if the runs cannot be equally long."""
    runs = 2 * size if zigzag else size
    if length % runs:
        raise ValueError(f"{length} tokens cannot be cut into {runs} equal runs: choose or pad to a multiple of {runs}")
    mine = torch.arange(length).view(runs, -1)
    return torch.cat([mine[rank], mine[runs - 1 - rank]]) if zigzag else mine[rank]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None) -> Any:
    """Attention to these keys alone, [batch, heads, queries, head width], and the logarithm of what its weights were
    divided by, [batch, heads, queries, 1]."""
    scores = score(query, key, hidden)
    total = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(total).exp_() @ value, total


def score(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores if hidden is None else scores.masked_fill_(hidden.to(scores.device), -torch.inf)


def merge(output: torch.Tensor, total: torch.Tensor, other: torch.Tensor, its_total: torch.Tensor) -> Any:
    """The attention to two sets of keys, from that to each: both are weighted by their share of the common divisor."""
    common = torch.logaddexp(total, its_total)
    return output * (total - common).exp() + other * (its_total - common).exp(), common


class Ring:
    """The ranks of a group, each with `length` tokens of a sequence. Blocks go to the right, from rank to rank."""

    def __init__(self, length: int, group: dist.ProcessGroup | None, zigzag: bool, causal: bool) -> None:
        self.group, self.runs, self.causal = group or dist.group.WORLD, 1 + zigzag, causal
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.positions = [own_positions(length * self.size, self.size, rank, zigzag) for rank in range(self.size)]

    def pass_on(self, block: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start to send a block to the right and to receive one from the left, which is there after these waits."""
        if self.size == 1:
            return block, []
        arriving = torch.empty_like(block)
        left, right = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (-1, 1))
        send = dist.P2POp(dist.isend, block, right, self.group)
        return arriving, dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, left, self.group)])

    def blocks(self, block: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[Any]]]:
        """Yield the block of each rank, this rank's own first, and what its queries need of it, see `pairs`. While the
        caller computes with a block, it is already on its way to the next rank."""
        for hop in range(self.size):
            arriving, works = self.pass_on(block) if hop + 1 < self.size else (block, [])
            yield block, [*self.pairs((self.rank - hop) % self.size)]
            wait(works)
            block = arriving

    def pairs(self, source: int) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
        """Yield each pair of a run of own queries and one of another rank's keys, as slices, that is not skipped: where
        all keys are visible, and where some are `hidden`, which is a mask [queries, keys]."""
        queries, keys = self.positions[self.rank], self.positions[source]
        run = len(queries) // self.runs
        slices = [slice(start, start + run) for start in range(0, len(queries), run)]
        for rows, columns in product(slices, slices):
            hidden = keys[columns] > queries[rows, None]
            if not self.causal or not hidden.any():
                yield rows, columns, None
            elif not hidden.all():
                yield rows, columns, hidden


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """Forward, keys and values go round. Backward they do so again, and the weights are computed again: the square of
    all queries and keys is never stored. The gradients of a block go round with it, one hop more, and so come home."""

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring) -> torch.Tensor:
        output, total = torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -torch.inf)
        for (keys, values), pairs in ring.blocks(torch.stack([key, value])):
            for rows, columns, hidden in pairs:
                part = attend(query[:, :, rows], keys[:, :, columns], values[:, :, columns], hidden)
                output[:, :, rows], total[:, :, rows] = merge(output[:, :, rows], total[:, :, rows], *part)
        context.ring = ring
        context.save_for_backward(query, key, value, output, total)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        ring: Ring = context.ring
        query, key, value, output, total = context.saved_tensors
        mean = (gradient * output).sum(-1, keepdim=True)  # of the weights' gradients, weighted by them
        of_query, works = torch.zeros_like(query), list[dist.Work]()
        arriving = torch.zeros_like(torch.stack([key, value]))
        for block, pairs in ring.blocks(torch.stack([key, value])):
            own = torch.zeros_like(block)
            for rows, columns, hidden in pairs:
                queries, due, (keys, values) = query[:, :, rows], gradient[:, :, rows], block[:, :, :, columns]
                weights = score(queries, keys, hidden).sub_(total[:, :, rows]).exp_()
                of_scores = weights * (due @ values.transpose(-1, -2) - mean[:, :, rows]) * query.shape[-1] ** -0.5
                of_query[:, :, rows] += of_scores @ keys
                own[0, :, :, columns] += of_scores.transpose(-1, -2) @ queries
                own[1, :, :, columns] += weights.transpose(-1, -2) @ due
            wait(works)  # for the sum of the ranks that had this block before
            arriving, works = ring.pass_on(own + arriving)
        wait(works)
        return of_query, *arriving, None


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    zigzag: bool = True,
    causal: bool = True,
) -> torch.Tensor:
    """Attention to the keys of all ranks, from this rank's queries, keys and values, all [batch, heads, length / N, head
    width], to the same. Raises `ValueError` as `own_positions` does."""
    return RingAttention.apply(query, key, value, Ring(query.shape[2], group, zigzag, causal))


class Swap(torch.autograd.Function):
    """An all_to_all: dimension `cut` is cut into N parts, one for each rank, and the parts that arrive are joined along
    `join`. Backward, the other way round."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, cut: int, join: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        context.back = join, cut, group
        parts = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=group)
        return torch.cat(arrived.unbind(), join)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return Swap.apply(gradient, *context.back), None, None, None


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    zigzag: bool = False,
    causal: bool = True,
) -> torch.Tensor:
    """As `ring_attention`. Between two exchanges a rank has all tokens, and 1/N of the heads. Raises `ValueError` if the
    heads cannot be shared so."""
    size, heads, length = dist.get_world_size(group), query.shape[1], query.shape[2]
    if heads % size:
        raise ValueError(f"{heads} heads cannot be shared by {size} ranks: choose a divisor of {heads}")
    order = torch.cat([own_positions(length * size, size, rank, zigzag) for rank in range(size)])
    swapped = Swap.apply(torch.stack([query, key, value]), 2, 3, group)
    whole = swapped[:, :, :, order.argsort()] if zigzag else swapped
    output = F.scaled_dot_product_attention(*whole, is_causal=causal)
    return Swap.apply(output[:, :, order] if zigzag else output, 2, 1, group)


WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}


def cut_sequence(
    model: nn.Module, group: dist.ProcessGroup | None = None, zigzag: bool = True, way: str = "ring"
) -> None:
    """Let a GPT, or a stage of one, work on this rank's tokens, in place: its positions and its attention change."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for module in model.modules():
        if isinstance(module, Embed):
            module.place = lambda ids: own_positions(ids.shape[1] * size, size, rank, zigzag).to(ids.device)
        if isinstance(module, Attention):
            module.attend = partial(WAYS[way], group=group, zigzag=zigzag)
