"""Context parallelism: the sequence is sharded over the ranks, and attention still sees all of it.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground context
    python -m playground context -n 4 --steps 5

Everything in a transformer but attention treats each token by itself: a rank computes with its own
tokens, and only attention communicates. In ring attention, queries stay where they are, and blocks
of keys and values go round the ring; each rank merges its attention to one block with that to the
next. Ulysses exchanges tokens for heads by an all_to_all, computes attention as usual, and
exchanges them back.

In causal attention a token does not see later keys. If each rank has one chunk of the sequence,
rank 0 needs the first block alone, and the last rank needs all. In the zigzag order, rank r has the
chunks r and 2N - 1 - r of 2N, and all ranks have equal work.
Sources: Liu et al., Ring Attention, 2023, arXiv 2310.01889; Dao et al., FlashAttention, 2022, arXiv
2205.14135; Jacobs et al., DeepSpeed Ulysses, 2023, arXiv 2309.14509; Grattafiori et al., Llama 3,
2024, arXiv 2407.21783 (3.3.2)
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
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode

from playground.lessons.tensor.lesson import GPTConfig, copying, copying_loss, new_gpt

Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks


def position_ids(length: int, size: int, rank: int, zigzag: bool) -> Tensor:
    """The positions of a rank's tokens in a sequence of `length`, [length / N]. Raises `ValueError`
    if the chunks cannot be equally long."""
    count = 2 * size if zigzag else size
    if length % count:
        rule = f"choose or pad to a multiple of {count}"
        raise ValueError(f"{length} tokens cannot be split into {count} equal chunks: {rule}")
    chunks = torch.arange(length).view(count, -1)
    return torch.cat([chunks[rank], chunks[count - 1 - rank]]) if zigzag else chunks[rank]


def tiles(
    queries: Tensor, keys: Tensor, zigzag: bool, causal: bool
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield each chunk of queries with each chunk of keys, both given by their positions: two
    slices, and which keys a query sees, [queries, keys], None for all. A tile in which no query
    sees a key is left out."""
    chunk = len(queries) // 2 if zigzag else len(queries)
    chunks = [slice(start, start + chunk) for start in range(0, len(queries), chunk)]
    for rows, columns in product(chunks, chunks):
        visible = keys[columns] <= queries[rows, None]
        if not causal or visible.all():
            yield rows, columns, None
        elif visible.any():
            yield rows, columns, visible


def attention_scores(q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """[..., queries, keys]: minus infinity where a query does not see a key."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores if visible is None else scores.masked_fill_(~visible.to(q.device), -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone, and its lse, [..., queries, 1]: the logarithm of the sum of
    exponentials that the softmax divides by."""
    scores = attention_scores(q, k, visible)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v, lse


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these queries and keys add to dq, dk and dv. `lse` and `delta`, [..., queries, 1], are
    those of attention to all keys."""
    weights = attention_scores(q, k, visible).sub_(lse).exp_()
    dscores = weights * (dout @ v.transpose(-1, -2) - delta) * q.shape[-1] ** -0.5
    return dscores @ k, dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to two sets of keys, from the attention to each: each is weighted by its part
    of the common sum. The exponents are never positive."""
    both = torch.logaddexp(lse, block_lse)
    return out * (lse - both).exp() + block_out * (block_lse - both).exp(), both


def pass_on(block: Tensor, group: Group) -> tuple[Tensor, list[dist.Work]]:
    """Start to send a block to the next rank. Returns the tensor in which the previous rank's block
    arrives, and the work to wait for."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return block, []
    received = torch.empty_like(block)
    send = dist.P2POp(dist.isend, block, group=group, group_peer=(rank + 1) % size)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
    return received, dist.batch_isend_irecv([send, receive])


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """Blocks travel round the ring in forward and again in backward: a rank keeps only its own."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, zigzag: bool, causal: bool
    ) -> Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        positions = [position_ids(size * q.shape[-2], size, r, zigzag) for r in range(size)]
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:-1], 1), -torch.inf)
        block = torch.stack([k, v])
        for hop in range(size):
            received, works = pass_on(block, group) if hop + 1 < size else (block, [])
            theirs = positions[(rank - hop) % size]
            for rows, columns, visible in tiles(positions[rank], theirs, zigzag, causal):
                keys, values = block[..., columns, :]
                part = attend(q[..., rows, :], keys, values, visible)
                merged = merge(out[..., rows, :], lse[..., rows, :], *part)
                out[..., rows, :], lse[..., rows, :] = merged
            wait(works)
            block = received
        ctx.arguments = positions, group, zigzag, causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """The weights are computed again: the square of queries and keys is never stored. The
        gradients of a block travel one hop behind it, and reach its owner after N hops."""
        q, k, v, out, lse = ctx.saved_tensors
        positions, group, zigzag, causal = ctx.arguments
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        delta = (dout * out).sum(-1, keepdim=True)  # FlashAttention's D
        dq, block = torch.zeros_like(q), torch.stack([k, v])
        dblock, grad_works = torch.zeros_like(block), list[dist.Work]()
        for hop in range(size):
            received, works = pass_on(block, group) if hop + 1 < size else (block, [])
            theirs, own = positions[(rank - hop) % size], torch.zeros_like(block)
            for rows, columns, visible in tiles(positions[rank], theirs, zigzag, causal):
                keys, values = block[..., columns, :]
                of_rows = (each[..., rows, :] for each in (dout, lse, delta))
                added = attend_backward(q[..., rows, :], keys, values, visible, *of_rows)
                dq[..., rows, :] += added[0]
                own[0, ..., columns, :] += added[1]
                own[1, ..., columns, :] += added[2]
            wait(grad_works)  # for the sum of the ranks that had this block before
            dblock, grad_works = pass_on(own + dblock, group)
            wait(works)
            block = received
        wait(grad_works)
        return dq, *dblock, None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = None, zigzag: bool = True, causal: bool = True
) -> Tensor:
    """Attention to the keys of all ranks, from and to [batch, heads, length / N, head width], those
    of this rank's positions. Raises `ValueError` as `position_ids` does."""
    return RingAttention.apply(q, k, v, group, zigzag, causal)


class SeqAllToAll(torch.autograd.Function):
    """Split a tensor along one dimension, a part for each rank, and join what arrives along
    another. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split_dim: int, join_dim: int, group: Group) -> Tensor:
        ctx.way_back = join_dim, split_dim, group
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), split_dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return SeqAllToAll.apply(gradient, *ctx.way_back), None, None, None


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = None, zigzag: bool = False, causal: bool = True
) -> Tensor:
    """As `ring_attention`; between two exchanges a rank has all tokens, and 1 / N of the heads.
    Raises `ValueError` if N does not divide the heads."""
    size, (heads, length) = dist.get_world_size(group), q.shape[1:3]
    if heads % size:
        raise ValueError(f"{heads} heads for {size} ranks: choose a divisor of {heads}")
    shards = [position_ids(length * size, size, rank, zigzag) for rank in range(size)]
    order = torch.cat(shards).to(q.device)
    qkv = SeqAllToAll.apply(torch.stack([q, k, v]), -3, -2, group)
    q, k, v = qkv.index_select(-2, order.argsort())
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return SeqAllToAll.apply(out.index_select(-2, order), -2, -3, group)


def shard_sequence(
    model: nn.Module, group: Group = None, zigzag: bool = True, attention: Any = ring_attention
) -> None:
    """Let a GPT, or some of its layers, work on this rank's tokens, in place."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def place(ids: Tensor) -> Tensor:
        return position_ids(ids.shape[1] * size, size, rank, zigzag).to(ids.device)

    for module in model.modules():
        if hasattr(module, "place"):
            module.place = place
        if hasattr(module, "attend"):
            module.attend = partial(attention, group=group, zigzag=zigzag)


def backward(model: nn.Module, positions: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of a whole batch [batch, length] and its gradients, on a rank that computes with
    these positions. The mean is over the targets of all ranks: one may have none."""
    logits = model(tokens[:, positions])
    total = F.cross_entropy(logits.flatten(0, 1), targets[:, positions].flatten(), reduction="sum")
    loss = total / (targets >= 0).sum()
    loss.backward()
    gradients = [param.grad for param in model.parameters()]
    flat = parameters_to_vector([*gradients, loss.detach()])
    dist.all_reduce(flat)  # a sum, and no mean: each rank has seen its own tokens
    vector_to_parameters(flat[:-1], gradients)
    return flat[-1]


class CountSent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others, by isend and all_to_all_single."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.c10d.send.default:
            self.count += args[0][0].nbytes
        if op is torch.ops.c10d.alltoall_base_.default:
            self.count += args[1].nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        return op(*args, **(kwargs or {}))


def compare(rank: int, size: int) -> None:
    """Print how far loss and gradients are from one process's, and what attention sends."""
    tokens, targets = copying(4, torch.Generator().manual_seed(1234))
    whole = new_gpt(GPTConfig(), 1234).double()
    expected = copying_loss(whole(tokens), targets)
    expected.backward()
    for order, attention in product(("contiguous", "zigzag"), (ring_attention, ulysses_attention)):
        model = new_gpt(GPTConfig(), 1234).double()
        shard_sequence(model, None, order == "zigzag", attention)
        positions = position_ids(tokens.shape[1], size, rank, order == "zigzag")
        with CountSent() as sent:
            loss = backward(model, positions, tokens, targets)
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        differences = [(one.grad - other.grad).abs().max() for one, other in pairs]
        apart = max(abs(loss - expected), *differences)
        if rank == 0:
            name = f"{order} {attention.__name__}"
            print(f"{name:28} {apart:.10f} from one process, {sent.count:,} bytes sent")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compare(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
