"""Tensor parallelism: every matrix of a transformer is sharded over the ranks, and all ranks work
on each token.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground tensor
    python -m playground tensor -n 4 --way sequence

Two matrices that follow each other, as in an MLP, need one sum between ranks: shard the first over
its outputs (columns of the textbook's matrix) and the second over its inputs (rows). Everything
between them, the GELU or whole heads of attention, stays on a rank. Where the ranks part, backward
adds up their gradients of the common input; where they meet, forward adds up their outputs:

                                        forward          backward
    copy_to_region (Megatron's f)       nothing          all_reduce
    reduce_from_region (g)              all_reduce       nothing
    gather_from_sequence_region         all_gather       reduce_scatter
    reduce_scatter_to_sequence_region   reduce_scatter   all_gather

Sequence parallelism shards the tokens outside these pairs, by the last two functions in place of
the first two. The same bytes are sent.
Sources: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053; Korthikanti et al., 2022, 2205.05198
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks
NUMBERS = SEPARATOR = 40  # 0 to 39 are copied; 40 separates them from their copy
IGNORED = -100  # the target of a token that has none, as in `F.cross_entropy`


@dataclass(frozen=True)
class GPTConfig:
    """Sizes that 2, 3 and 4 divide. There is no dropout: ranks with shards of a tensor would have
    to shard its mask."""

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

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(self.place(ids))

    def place(self, ids: Tensor) -> Tensor:
        """The positions of these tokens, [length]. Replaced where the sequence is sharded."""
        return torch.arange(ids.shape[1], device=ids.device)


class Attention(nn.Module):
    """Causal: [batch, length, width] → the same, with as many heads as `query` has outputs for.
    The key has no bias: its gradient would be rounding alone, which Adam scales to a whole step."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = (project(hidden) for project in (self.query, self.key, self.value))
        heads = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in projected)
        return self.output(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, length, head width] → the same. Replaced where others have other keys."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention between tokens, then an MLP on each, both added to their input:
    [batch, length, width] → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))

    def mlp(self, hidden: Tensor) -> Tensor:
        """[batch, length, width] → the same. Replaced by a mixture of experts."""
        return self.down(F.gelu(self.up(hidden)))


def new_gpt(config: GPTConfig, seed: int) -> nn.Sequential:
    """A GPT, in float32 on the CPU: ids [batch, length] → logits [batch, length, vocabulary]."""
    return nn.Sequential(*(new_unit(config, seed, unit) for unit in range(config.layers + 2)))


def new_unit(config: GPTConfig, seed: int, unit: int) -> nn.Module:
    """A child of the model: 0 is the embedding, the last the head. It draws from a generator of its
    own, whole, so that it is the same however the model is sharded. Biases are drawn, too: one that
    is added twice must show."""
    logits = nn.Linear(config.width, config.vocabulary, bias=False)
    head = nn.Sequential(nn.LayerNorm(config.width), logits)
    module = Embed(config) if unit == 0 else Block(config) if unit <= config.layers else head
    generator = torch.Generator().manual_seed(1000 * seed + unit)
    for part in module.modules():
        for param in () if isinstance(part, nn.LayerNorm) else part.parameters(recurse=False):
            nn.init.normal_(param, std=0.05, generator=generator)
    return module


def copying(samples: int, generator: torch.Generator, length: int = 48) -> tuple[Tensor, Tensor]:
    """Tokens and targets [samples, length]: random numbers, the separator, the numbers again; those
    have targets."""
    numbers = torch.randint(NUMBERS, (samples, length // 2), generator=generator)
    separator = torch.full((samples, 1), SEPARATOR)
    tokens = torch.cat([numbers, separator, numbers[:, :-1]], dim=1)
    return tokens, torch.cat([torch.full_like(numbers, IGNORED), numbers], dim=1)


def copying_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Mirrored(torch.autograd.Function):
    """One collective forward and, for the gradient, its mirror image in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Any, backward: Any, group: Group) -> Tensor:
        ctx.mirror_image = partial(backward, group=group)
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.mirror_image(gradient), None, None, None


def copy_to_region(tensor: Tensor, group: Group = None) -> Tensor:
    """Megatron's f: from the ranks' common input to their shards of a matrix."""
    return Mirrored.apply(tensor, identity, all_reduce, group)


def reduce_from_region(tensor: Tensor, group: Group = None) -> Tensor:
    """Megatron's g: from the summand that each rank has computed to the sum."""
    return Mirrored.apply(tensor, all_reduce, identity, group)


def gather_from_sequence_region(tensor: Tensor, group: Group = None) -> Tensor:
    """f where tokens are sharded: [batch, length / N, width] → [batch, length, width]."""
    return Mirrored.apply(tensor, all_gather, reduce_scatter, group)


def reduce_scatter_to_sequence_region(tensor: Tensor, group: Group = None) -> Tensor:
    """g where tokens are sharded: [batch, length, width] → this rank's tokens of the sum,
    [batch, length / N, width]. Raises `ValueError` for a length that N does not divide."""
    return Mirrored.apply(tensor, reduce_scatter, all_gather, group)


def identity(tensor: Tensor, group: Group) -> Tensor:
    return tensor.view_as(tensor)


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # autograd may still need `tensor`
    dist.all_reduce(total, group=group)
    return total


def all_gather(local: Tensor, group: Group) -> Tensor:
    """Join the tokens, dimension 1, of all ranks. The collective joins dimension 0."""
    local = local.transpose(0, 1).contiguous()
    gathered = local.new_empty(dist.get_world_size(group) * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered.transpose(0, 1).contiguous()


def reduce_scatter(summand: Tensor, group: Group) -> Tensor:
    """This rank's tokens of the sum."""
    summand = summand.transpose(0, 1).contiguous()
    count, size = len(summand), dist.get_world_size(group)
    if count % size:
        raise ValueError(f"{count} tokens for {size} ranks: pad to a multiple of {size}")
    local = summand.new_empty(count // size, *summand.shape[1:])
    dist.reduce_scatter_tensor(local, summand, group=group)
    return local.transpose(0, 1).contiguous()


def shard(param: Tensor, dim: int, group: Group = None) -> nn.Parameter:
    """This rank's shard of a parameter, one of N equal ones along `dim`. Raises `ValueError` for a
    size that N does not divide."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if param.shape[dim] % size:
        raise ValueError(
            f"{param.shape[dim]} cannot be sharded over {size} ranks: choose a divisor"
        )
    return nn.Parameter(param.detach().chunk(size, dim)[rank].clone())


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of `linear`, from all inputs. Nothing is exchanged here: the inputs have
    passed `copy_to_region`, once for all the layers that they go to."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self.weight = shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Behind column-parallel layers: this rank has its shard of the inputs, and so a summand of
    each output. The bias is added once, after the sum."""

    def __init__(self, linear: nn.Linear, group: Group, reduce: Any = reduce_from_region) -> None:
        super().__init__()
        self.reduce = partial(reduce, group=group)
        self.weight = shard(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, local: Tensor) -> Tensor:
        output = self.reduce(F.linear(local, self.weight))
        return output if self.bias is None else output + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding sharded over the vocabulary: a token's row is on one rank, the others contribute
    zeros. Raises `IndexError` as `local_index` does."""

    def __init__(self, rows: nn.Embedding, group: Group, reduce: Any = reduce_from_region) -> None:
        super().__init__()
        self.group = group
        self.reduce = partial(reduce, group=group)
        self.weight = shard(rows.weight, 0, group)

    def forward(self, ids: Tensor) -> Tensor:
        index, is_local = local_index(ids, len(self.weight), self.group)
        return self.reduce(F.embedding(index, self.weight).where(is_local.unsqueeze(-1), 0))


def local_index(ids: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """Where ids are among the `count` of this rank, 0 for those of others; and whether they are its
    own. Raises `IndexError` for an id that no rank has, on all ranks: none waits for another."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    owner = ids // count
    if (outside := ids[(owner < 0) | (owner >= size)]).numel():
        raise IndexError(f"{outside[0].item()} is out of range: ids are 0 to {count * size - 1}")
    is_local = owner == rank
    return (ids - rank * count).where(is_local, 0), is_local


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group = None, count: int = 0
) -> Tensor:
    """The mean cross entropy, from logits [batch, length, vocabulary / N], which are never
    gathered: three all_reduces of [batch, length]. Targets `IGNORED` do not count. With `count`,
    the sum over targets divided by that. Raises `IndexError` for targets outside the vocabulary."""
    has_target = targets != IGNORED
    index, is_local = local_index(targets.where(has_target, 0), logits.shape[-1], group)
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)  # so that exp does not overflow
    logits = logits - highest.unsqueeze(-1)
    total = reduce_from_region(logits.exp().sum(-1), group)
    of_target = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).where(is_local, 0)
    losses = total.log() - reduce_from_region(of_target, group)
    return losses[has_target].sum() / (count or has_target.sum())


def shard_gpt(
    model: nn.Sequential, group: Group = None, sequence: bool = False
) -> list[nn.Parameter]:
    """Shard a GPT over the ranks, in place; with `sequence`, its tokens, too, where matrices are
    not. Returns the parameters that stay replicated."""
    unsharded = set(model.parameters())
    enter, leave = copy_to_region, reduce_from_region
    if sequence:
        enter, leave = gather_from_sequence_region, reduce_scatter_to_sequence_region
    embed, *blocks, head = model
    embed.tokens = VocabParallelEmbedding(embed.tokens, group, leave)
    if sequence:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        embed.place = lambda ids: torch.arange(ids.shape[1], device=ids.device).chunk(size)[rank]
    for block in blocks:
        attention = block.attention
        attention.query = ColumnParallelLinear(attention.query, group)  # whole heads
        attention.key = ColumnParallelLinear(attention.key, group)
        attention.value = ColumnParallelLinear(attention.value, group)
        attention.output = RowParallelLinear(attention.output, group, leave)
        block.up = ColumnParallelLinear(block.up, group)
        block.down = RowParallelLinear(block.down, group, leave)
    head[1] = ColumnParallelLinear(head[1], group)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        norm.register_forward_hook(lambda norm, inputs, output: enter(output, group))
    return [param for param in model.parameters() if param in unsharded]


def sum_replicated_gradients(replicated: list[nn.Parameter], group: Group = None) -> None:
    """After backward, for parameters that have seen the tokens of this rank alone."""
    gradients = [param.grad for param in replicated]
    total = parameters_to_vector(gradients)
    dist.all_reduce(total, group=group)
    vector_to_parameters(total, gradients)


def train(sequence: bool, steps: int = 70) -> None:
    """Train a sharded GPT beside an unsharded one, in float64, and compare their losses."""
    from torch.distributed.tensor.debug import CommDebugMode  # here: importing it takes seconds

    unsharded, model = (new_gpt(GPTConfig(), seed=1234).double() for _ in range(2))
    replicated = shard_gpt(model, sequence=sequence)
    optimizer = torch.optim.AdamW([*unsharded.parameters(), *model.parameters()], lr=2e-3)
    generator = torch.Generator().manual_seed(1234)  # the same batches on every rank
    losses, differences = [], []
    for _ in range(steps):
        tokens, targets = copying(24, generator)
        optimizer.zero_grad()
        expected = copying_loss(unsharded(tokens), targets)
        expected.backward()
        with CommDebugMode() as counter:
            loss = vocab_parallel_cross_entropy(model(tokens), targets)
            loss.backward()
            if sequence:
                sum_replicated_gradients(replicated)
        optimizer.step()
        losses.append(loss.item())
        differences.append(abs(loss.item() - expected.item()))
    if dist.get_rank() == 0:
        local, total = (sum(p.numel() for p in each.parameters()) for each in (model, unsharded))
        print("sequence parallelism" if sequence else "tensor parallelism")
        print(f"    {local:,} of {total:,} parameters per rank")
        print(f"    {counter.get_total_counts()} collectives per step")
        print(f"    loss {losses[0]:.4f} in step 1, {losses[-1]:.4f} in step {steps}")
        print(f"    at most {max(differences):.12f} from the unsharded model's loss")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sequence=False)
    train(sequence=True)
    dist.destroy_process_group()
