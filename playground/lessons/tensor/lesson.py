"""Tensor parallelism: every matrix of a transformer is cut over the ranks, and all ranks work on each token.

    python -m playground tensor
    python -m playground tensor -n 4 --way sequence
    python -m playground tensor --link 0.5

Two matrices that follow each other, as in an MLP, need one sum between ranks: cut the first over its outputs (a column
of the textbook's matrix each) and the second over its inputs (a row each). Everything between them, the GELU or whole
heads of attention, stays on a rank. Where the ranks part, backward must add up what each of them says about the common
input; where they meet, forward adds up. These two are each other's mirror image:

                              forward          backward
    enter                     nothing          all_reduce
    leave                     all_reduce       nothing
    enter, tokens shared      all_gather       reduce_scatter
    leave, tokens shared      reduce_scatter   all_gather

Sequence parallelism shares the tokens outside these pairs. The same bytes are sent.
Sources: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053; Korthikanti et al., 2022, arXiv 2205.05198
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

NUMBERS = SEPARATOR = 40  # 0 to 39 are copied; 40 separates them from their copy


@dataclass(frozen=True)
class GPTConfig:
    """Sizes that 2, 3 and 4 divide. There is no dropout: ranks with shards of a tensor would have to shard its mask."""

    layers: int = 2
    width: int = 96
    heads: int = 12
    length: int = 48
    vocabulary: int = 48


class Embed(nn.Module):
    """Token ids [batch, length] → [batch, length, width]: token + position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions(self.place(ids))

    def place(self, ids: torch.Tensor) -> torch.Tensor:
        """The position of each of these tokens, [length]. To be replaced where a rank has a part of the sequence."""
        return torch.arange(ids.shape[1], device=ids.device)


class Attention(nn.Module):
    """Causal: [batch, length, width] → the same, with as many heads as `query` has rows for. The key has no bias: its
    gradient would be rounding alone, which Adam scales up to a whole step."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query, self.key, self.value = (nn.Linear(config.width, config.width, bias=False) for _ in range(3))
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = (project(hidden) for project in (self.query, self.key, self.value))
        heads = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in rows)
        return self.output(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All [batch, heads, length, head width] → the same. To be replaced where other ranks have other keys."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention between tokens, then an MLP on each, both added to what came in: [batch, length, width] → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] → the same. To be replaced where there are several, and tokens choose among them."""
        return self.down(F.gelu(self.up(hidden)))


def new_gpt(config: GPTConfig, seed: int) -> nn.Sequential:
    """A GPT, in float32 on the CPU: ids [batch, length] → logits [batch, length, vocabulary]."""
    return nn.Sequential(*(new_unit(config, seed, unit) for unit in range(config.layers + 2)))


def new_unit(config: GPTConfig, seed: int, unit: int) -> nn.Module:
    """A child of the model: 0 is the embedding, the last the head. It draws from a generator of its own, whole, so that
    it is the same however the model is cut over ranks. Biases are drawn, too: one that is added twice must show."""
    head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False))
    module = Embed(config) if unit == 0 else Block(config) if unit <= config.layers else head
    generator = torch.Generator().manual_seed(1000 * seed + unit)
    for part in module.modules():
        for param in () if isinstance(part, nn.LayerNorm) else part.parameters(recurse=False):
            nn.init.normal_(param, std=0.05, generator=generator)
    return module


def copying(samples: int, generator: torch.Generator, length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [samples, length]: random numbers, the separator, the numbers again; those have targets."""
    numbers = torch.randint(NUMBERS, (samples, length // 2), generator=generator)
    tokens = torch.cat([numbers, torch.full((samples, 1), SEPARATOR), numbers[:, :-1]], dim=1)
    return tokens, torch.cat([torch.full_like(numbers, -100), numbers], dim=1)  # cross_entropy ignores -100


def copying_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


Exchange = Callable[[torch.Tensor], torch.Tensor]


class Mirrored(torch.autograd.Function):
    """One exchange forward, and in backward, for the gradient, its mirror image."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, forward: Exchange, backward: Exchange) -> torch.Tensor:
        context.exchange = backward
        return forward(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return context.exchange(gradient), None, None


class Ranks:
    """The ranks of `group` (all, by default) that a model is cut over, and what they exchange.

    A hidden tensor is [batch, length, width]; with `sequence` and outside of `enter` … `leave` [batch, length / N, …].
    """

    def __init__(self, group: dist.ProcessGroup | None = None, sequence: bool = False) -> None:
        self.group, self.sequence = group, sequence
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the ranks' common input to their parts of a matrix."""
        there, back = (self.all_gather, self.reduce_scatter) if self.sequence else (self.nothing, self.all_reduce)
        return Mirrored.apply(tensor, there, back)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the summands that each rank has computed to their sum."""
        there, back = (self.reduce_scatter, self.all_gather) if self.sequence else (self.all_reduce, self.nothing)
        return Mirrored.apply(tensor, there, back)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on each of them, whether tokens are shared or not."""
        return Mirrored.apply(tensor, self.all_reduce, self.nothing)

    def nothing(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=op, group=self.group)
        return total

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, length / N, width] → [batch, length, width]; the collective joins the first dimension."""
        part = part.transpose(0, 1).contiguous()
        whole = part.new_empty(self.size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole.transpose(0, 1).contiguous()

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] → this rank's [batch, length / N, width] of the sum. Raises `ValueError` for a length
        that N does not divide."""
        whole = whole.transpose(0, 1).contiguous()
        if len(whole) % self.size:
            raise ValueError(f"{len(whole)} tokens cannot be shared by {self.size} ranks: pad to a multiple of that")
        part = whole.new_empty(len(whole) // self.size, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=self.group)
        return part.transpose(0, 1).contiguous()

    def part_of(self, whole: torch.Tensor, dim: int) -> nn.Parameter:
        """This rank's part of a parameter, of N equal ones along `dim`. Raises `ValueError` if it cannot be cut so."""
        if whole.shape[dim] % self.size:
            raise ValueError(f"{whole.shape[dim]} cannot be cut into {self.size} equal parts: choose a divisor as -n")
        return nn.Parameter(whole.detach().chunk(self.size, dim)[self.rank].clone())


def cut_outputs(linear: nn.Linear, ranks: Ranks) -> None:
    """Column-parallel: this rank computes its part of the outputs, from all inputs. Nothing needs to be exchanged."""
    linear.weight = ranks.part_of(linear.weight, 0)
    if linear.bias is not None:
        linear.bias = ranks.part_of(linear.bias, 0)


class RowParallel(nn.Module):
    """Behind column-parallel layers: this rank has its part of the inputs, and so a summand of each output. The bias is
    added once, after the sum."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.weight, self.bias = ranks, ranks.part_of(linear.weight, 1), linear.bias

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        total = self.ranks.leave(F.linear(part, self.weight))
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding cut over the vocabulary: each token's row is on one rank, and zero on all others."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, ranks.part_of(embedding.weight, 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, length] → their rows [batch, length, width], with `sequence` of this rank's tokens. Raises
        `IndexError` as `find_here` does."""
        row, is_mine = find_here(ids, len(self.weight), self.ranks)
        return self.ranks.leave(F.embedding(row, self.weight).where(is_mine.unsqueeze(-1), 0))


def find_here(ids: torch.Tensor, count: int, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Where ids are among the `count` that this rank has, 0 for those elsewhere; and whether they are here. Raises
    `IndexError` for an id that no rank has: all ranks see the same ids, so that none waits for one that has raised."""
    owner = ids // count
    if (outside := ids[(owner < 0) | (owner >= ranks.size)]).numel():
        raise IndexError(f"{outside[0].item()} is out of range: the ranks have {count * ranks.size}, from 0 on")
    is_mine = owner == ranks.rank
    return (ids - ranks.rank * count).where(is_mine, 0), is_mine


IGNORED = -100
"""The target of a token that has none, as in `F.cross_entropy`."""


def vocabulary_loss(logits: torch.Tensor, targets: torch.Tensor, ranks: Ranks, count: int = 0) -> torch.Tensor:
    """The mean cross entropy, from logits [batch, length, vocabulary / N], which are never gathered: three all_reduces
    of [batch, length]. Targets `IGNORED` do not count. With `count`, the sum over targets divided by that. Raises
    `IndexError` for targets that are no columns of the logits."""
    has_target = targets != IGNORED
    column, is_mine = find_here(targets.where(has_target, 0), logits.shape[-1], ranks)
    highest = ranks.all_reduce(logits.detach().amax(-1), dist.ReduceOp.MAX)  # of all ranks: exp must not overflow
    logits = logits - highest.unsqueeze(-1)
    total = ranks.add_up(logits.exp().sum(-1))
    of_target = ranks.add_up(logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).where(is_mine, 0))
    return (total.log() - of_target)[has_target].sum() / (count or has_target.sum())


def cut(model: nn.Sequential, ranks: Ranks) -> list[nn.Parameter]:
    """Cut a GPT (embedding, blocks, head) over the ranks, in place. Returns the parameters that stay whole."""
    before = set(model.parameters())
    embed, *blocks, head = model
    embed.tokens = VocabularyEmbedding(embed.tokens, ranks)
    if ranks.sequence:
        embed.place = lambda ids: torch.arange(ids.shape[1], device=ids.device).chunk(ranks.size)[ranks.rank]
    for block in blocks:
        attention = block.attention
        for linear in (attention.query, attention.key, attention.value, block.up):  # whole heads, if N divides them
            cut_outputs(linear, ranks)
        attention.output, block.down = RowParallel(attention.output, ranks), RowParallel(block.down, ranks)
    cut_outputs(head[1], ranks)
    for norm in (*(norm for block in blocks for norm in (block.attention_norm, block.mlp_norm)), head[0]):
        norm.register_forward_hook(lambda norm, inputs, output: ranks.enter(output))  # once for query, key and value
    return [param for param in model.parameters() if param in before]


def backward(loss: torch.Tensor, whole: list[nn.Parameter], ranks: Ranks) -> None:
    """Compute the gradients. With `sequence`, a parameter that is whole has seen the tokens of this rank alone."""
    loss.backward()
    if ranks.sequence:
        total = ranks.all_reduce(torch.cat([param.grad.flatten() for param in whole]))
        for param, gradient in zip(whole, total.split([param.numel() for param in whole]), strict=True):
            param.grad = gradient.view_as(param)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
