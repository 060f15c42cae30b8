"""Functions of torch, computed by ranks that hold shards: by ZeRO, or by tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from playground.training.sharding import FlatParameter
from playground.training.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_region,
    reduce_from_region,
    shard,
)
from playground.training.tiny_gpt import IGNORED


def clip_grad_norm(flat_params: Sequence[FlatParameter], max_norm: float) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, by the norm of all ranks' shards together, which it
    returns. What is replicated counts once. All must call this, after backward."""
    squares = [flat.shard.grad.square().sum() * flat.shards for flat in flat_params]
    norm = torch.stack(squares).sum() / dist.get_world_size()
    dist.all_reduce(norm)
    norm.sqrt_()
    for flat in flat_params:
        flat.shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, from logits [batch, length, vocabulary / N], which are never
    gathered: three all_reduces of [batch, length]. Targets `IGNORED` do not count. Raises
    `IndexError` for targets outside the vocabulary."""
    has_target = targets != IGNORED
    index, is_local = local_index(targets.where(has_target, 0), logits.shape[-1])
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)  # so that exp does not overflow
    logits = logits - highest.unsqueeze(-1)
    total = reduce_from_region(logits.exp().sum(-1))
    of_target = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).where(is_local, 0)
    losses = total.log() - reduce_from_region(of_target)
    return losses[has_target].mean()


class VocabParallelEmbedding(nn.Module):
    """An embedding sharded over the vocabulary: a token's row is on one rank, the others contribute
    zeros. Raises `IndexError` as `local_index` does."""

    def __init__(self, rows: nn.Embedding) -> None:
        super().__init__()
        self.weight = shard(rows.weight, 0)

    def forward(self, ids: Tensor) -> Tensor:
        index, is_local = local_index(ids, len(self.weight))
        rows = F.embedding(index, self.weight).where(is_local.unsqueeze(-1), 0)
        return reduce_from_region(rows)


def local_index(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where ids are among the `count` of this rank, 0 for those of others; and whether they are its
    own. Raises `IndexError` for an id that no rank has, on all ranks: none waits for another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    owner = ids // count
    if (outside := ids[(owner < 0) | (owner >= size)]).numel():
        raise IndexError(f"{outside[0].item()} is out of range: ids are 0 to {count * size - 1}")
    is_local = owner == rank
    return (ids - rank * count).where(is_local, 0), is_local


def shard_gpt(model: nn.Sequential) -> None:
    """Shard a GPT over the ranks, in place."""
    embed, *blocks, head = model
    embed.tokens = VocabParallelEmbedding(embed.tokens)
    for block in blocks:
        attention = block.attention
        attention.query = ColumnParallelLinear(attention.query)  # whole heads
        attention.key = ColumnParallelLinear(attention.key)
        attention.value = ColumnParallelLinear(attention.value)
        attention.output = RowParallelLinear(attention.output)
        block.up = ColumnParallelLinear(block.up)
        block.down = RowParallelLinear(block.down)
    head[1] = ColumnParallelLinear(head[1])
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        norm.register_forward_hook(lambda norm, inputs, output: copy_to_region(output))
