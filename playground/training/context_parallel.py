"""Ring attention for what the exercises on context are judged by: every query sees every key, and
messages travel while a rank computes.

Source: Liu et al., Ring Attention, 2023, arXiv 2310.01889
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone, and its lse, [..., queries, 1]: the logarithm of the sum of
    exponentials that the softmax divides by."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What these queries and keys add to dq, dk and dv. `lse` and `delta`, [..., queries, 1], are
    those of attention to all keys."""
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 - lse).exp()
    dscores = weights * (dout @ v.transpose(-1, -2) - delta) * q.shape[-1] ** -0.5
    return dscores @ k, dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two sets of keys, from the attention to each: each is weighted by its part
    of the common sum. The exponents are never positive."""
    both = torch.logaddexp(lse, block_lse)
    return out * (lse - both).exp() + block_out * (block_lse - both).exp(), both


def pass_on(block: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Start to send a block to the next rank. Returns the tensor in which the previous rank's block
    arrives, and the work to wait for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return block, []
    received = torch.empty_like(block)
    send = dist.P2POp(dist.isend, block, (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % size)
    return received, dist.batch_isend_irecv([send, receive])


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """Blocks travel round the ring in forward and again in backward: a rank keeps only its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        block = torch.stack([k, v])
        for hop in range(size := dist.get_world_size()):
            received, works = pass_on(block) if hop + 1 < size else (block, [])
            keys, values = block
            out, lse = merge(out, lse, *attend(q, keys, values))
            wait(works)
            block = received
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        """The weights are computed again: the square of queries and keys is never stored. The
        gradients of a block travel one hop behind it, and reach its owner after N hops."""
        q, k, v, out, lse = ctx.saved_tensors
        delta = (dout * out).sum(-1, keepdim=True)  # FlashAttention's D
        dq, block = torch.zeros_like(q), torch.stack([k, v])
        dblock, grad_works = torch.zeros_like(block), list[dist.Work]()
        for hop in range(size := dist.get_world_size()):
            received, works = pass_on(block) if hop + 1 < size else (block, [])
            keys, values = block
            added, *own = attend_backward(q, keys, values, dout, lse, delta)
            dq += added
            wait(grad_works)  # for the sum of the ranks that had this block before
            dblock, grad_works = pass_on(torch.stack(own) + dblock)
            wait(works)
            block = received
        wait(grad_works)
        return dq, *dblock


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the keys of all ranks, from and to [batch, heads, length / N, head width], those
    of this rank's tokens."""
    return RingAttention.apply(q, k, v)
