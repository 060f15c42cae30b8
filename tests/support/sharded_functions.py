"""Functions of torch, computed by ranks that hold shards: by ZeRO, or by tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from playground.training.sharding import FlatParameter
from playground.training.tensor_parallel import local_index, reduce_from_region
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
