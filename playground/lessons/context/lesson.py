"""Context parallelism: the sequence is cut over the ranks, and attention still sees every token before its own.

    python -m playground context
    python -m playground context -n 4 --steps 5

Everything in a transformer but attention treats each token by itself: a rank takes its part of the tokens, and only
attention exchanges something. In ring attention, queries stay where they are, and blocks of keys and values go round
the ring; each rank merges its attention to one block with that to the next. Ulysses exchanges tokens for heads by an
all_to_all, computes attention as usual, and exchanges them back.

A causal token does not see the keys behind it. With one run of tokens on each rank, rank 0 needs the first block alone,
and the last rank needs all. In the zigzag order, rank r has the runs r and 2N - 1 - r of 2N, and all have equal work.
Sources: Liu et al., Ring Attention, 2023, arXiv 2310.01889; Dao et al., FlashAttention, 2022, arXiv 2205.14135;
Jacobs et al., DeepSpeed Ulysses, 2023, arXiv 2309.14509; Grattafiori et al., Llama 3, 2024, arXiv 2407.21783 (3.3.2)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from playground.lessons.tensor.lesson import Mirrored

Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks


def own_positions(length: int, size: int, rank: int, zigzag: bool) -> Tensor:
    """The positions of this rank's tokens, [length / N]. Raises `ValueError` if the runs cannot be equally long."""
    count = 2 * size if zigzag else size
    if length % count:
        raise ValueError(f"{length} tokens cannot be cut into {count} equal runs: choose or pad to a multiple of that")
    runs = torch.arange(length).view(count, -1)
    return torch.cat([runs[rank], runs[count - 1 - rank]]) if zigzag else runs[rank]


def score(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    """[…, queries, keys]; `hidden`, [queries, keys], says which of these a query does not see."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores if hidden is None else scores.masked_fill_(hidden.to(scores.device), -torch.inf)


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone, and the logarithm of the softmax's divisor, […, queries, 1]."""
    scores = score(query, key, hidden)
    divisor = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(divisor).exp_() @ value, divisor


def merge(output: Tensor, divisor: Tensor, other: Tensor, its_divisor: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two sets of keys, from the attention to each: each counts by its share of the common divisor."""
    common = torch.logaddexp(divisor, its_divisor)
    return output * (divisor - common).exp() + other * (its_divisor - common).exp(), common


class Ring:
    """The ranks of a group, each with `length` tokens of a sequence. Blocks go from each rank to the next one."""

    def __init__(self, length: int, group: Group, zigzag: bool, causal: bool) -> None:
        self.group, self.causal, run = group or dist.group.WORLD, causal, length // 2 if zigzag else length
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.positions = [own_positions(length * self.size, self.size, rank, zigzag) for rank in range(self.size)]
        self.runs = [slice(start, start + run) for start in range(0, length, run)]

    def pass_on(self, block: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to send a block to the next rank. Returns that of the rank before; it is there after the waits."""
        if self.size == 1:
            return block, []
        arriving = torch.empty_like(block)
        before, after = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (-1, 1))
        send = dist.P2POp(dist.isend, block, after, self.group)
        return arriving, dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, before, self.group)])

    def blocks(self, block: Tensor) -> Iterator[tuple[Tensor, Iterator[Any]]]:
        """Yield the block of each rank, this rank's own first, and what its queries need of it: see `pairs`. While the
        caller computes with a block, it is already on its way to the next rank."""
        for hop in range(self.size):
            arriving, works = self.pass_on(block) if hop + 1 < self.size else (block, [])
            yield block, self.pairs((self.rank - hop) % self.size)
            wait(works)
            block = arriving

    def pairs(self, source: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield each run of own queries with each run of the source's keys, as slices, and what is hidden, if anything
        is. A pair in which everything is hidden is skipped."""
        for rows, columns in product(self.runs, self.runs):
            hidden = self.positions[source][columns] > self.positions[self.rank][rows, None]
            if not (self.causal and hidden.all()):
                yield rows, columns, hidden if self.causal and hidden.any() else None


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """Keys and values go round forward and, since a rank keeps its own alone, backward. There the weights are computed
    again: the square is never stored. A block's gradients travel with it and, by one hop more, home."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        output, divisor = torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -torch.inf)
        for (keys, values), pairs in ring.blocks(torch.stack([key, value])):
            for rows, columns, hidden in pairs:
                part = attend(query[:, :, rows], keys[:, :, columns], values[:, :, columns], hidden)
                output[:, :, rows], divisor[:, :, rows] = merge(output[:, :, rows], divisor[:, :, rows], *part)
        context.ring = ring
        context.save_for_backward(query, key, value, output, divisor)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, divisor = context.saved_tensors
        mean = (gradient * output).sum(-1, keepdim=True)  # of the gradients of a query's weights, by these weights
        of_query, of_block, works = torch.zeros_like(query), torch.zeros_like(key), list[dist.Work]()
        for block, pairs in context.ring.blocks(torch.stack([key, value])):
            own = torch.zeros_like(block)
            for rows, columns, hidden in pairs:
                queries, due, (keys, values) = query[:, :, rows], gradient[:, :, rows], block[:, :, :, columns]
                weights = score(queries, keys, hidden).sub_(divisor[:, :, rows]).exp_()
                of_scores = weights * (due @ values.transpose(-1, -2) - mean[:, :, rows]) * query.shape[-1] ** -0.5
                of_query[:, :, rows] += of_scores @ keys
                own[0, :, :, columns] += of_scores.transpose(-1, -2) @ queries
                own[1, :, :, columns] += weights.transpose(-1, -2) @ due
            wait(works)  # for the sum of all ranks that had this block before
            of_block, works = context.ring.pass_on(own + of_block)
        wait(works)
        return of_query, *of_block, None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group = None, zigzag: bool = True, causal: bool = True
) -> Tensor:
    """Attention to the keys of all ranks, from and to [batch, heads, length / N, head width], a rank's own positions'.
    Raises `ValueError` as `own_positions` does."""
    return RingAttention.apply(query, key, value, Ring(query.shape[2], group, zigzag, causal))


def swap(tensor: Tensor, cut: int, join: int, group: Group) -> Tensor:
    """Dimension `cut` is cut into N parts, one for each rank, and the parts that arrive are joined along `join`."""
    parts = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return torch.cat(arrived.unbind(), join)


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group = None, zigzag: bool = False, causal: bool = True
) -> Tensor:
    """As `ring_attention`; between two exchanges a rank has all tokens, and 1 / N of the heads. Raises `ValueError` if
    the heads cannot be shared so."""
    size, heads, length = dist.get_world_size(group), query.shape[1], query.shape[2]
    if heads % size:
        raise ValueError(f"{heads} heads cannot be shared by {size} ranks: choose a divisor of {heads}")
    to_heads, to_tokens = partial(swap, cut=-3, join=-2, group=group), partial(swap, cut=-2, join=-3, group=group)
    order = torch.cat([own_positions(length * size, size, rank, zigzag) for rank in range(size)]).to(query.device)
    swapped = Mirrored.apply(torch.stack([query, key, value]), to_heads, to_tokens)
    query, key, value = swapped.index_select(-2, order.argsort())
    output = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return Mirrored.apply(output.index_select(-2, order), to_tokens, to_heads)


WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}


def cut_sequence(model: nn.Module, group: Group = None, zigzag: bool = True, way: str = "ring") -> None:
    """Let a GPT, or a part of one, work on this rank's tokens, in place: its positions and its attention change."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for module in model.modules():
        if hasattr(module, "place"):
            module.place = lambda ids: own_positions(ids.shape[1] * size, size, rank, zigzag).to(ids.device)
        if hasattr(module, "attend"):
            module.attend = partial(WAYS[way], group=group, zigzag=zigzag)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
