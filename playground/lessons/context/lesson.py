"""Context parallelism: each of N ranks has T / N tokens of every sequence, and the whole model.

Norms, MLPs and embeddings treat each token by itself. Only attention needs tokens of other ranks.
In a ring, blocks of keys and values go from rank to rank, until all queries have met all keys. The
attention to two blocks is merged by what their softmaxes divide by, exp(lse):

    out = (out1 · exp(lse1) + out2 · exp(lse2)) / (exp(lse1) + exp(lse2))

    python -m playground context
    torchrun --nproc-per-node 3 lesson.py

    …
    Rank 0, zigzag: 0 1 2 3 20 21 22 23, pairs 36+32+32, difference 6e-17
    Rank 1, zigzag: 4 5 6 7 16 17 18 19, pairs 36+32+32, difference 6e-17
    Rank 2, zigzag: 8 9 10 11 12 13 14 15, pairs 36+32+32, difference 6e-17

A row has the positions of this rank's tokens in a sequence of 24. Pairs counts the pairs of a query
and a key that it may see: in the rank's own block, then in those that come in hops 1 and 2. The
largest difference of a gradient from one process, on any rank, is rounding.
Sources: Liu et al., Ring Attention, 2023, arXiv 2310.01889; Dao et al., FlashAttention, NeurIPS
2022, arXiv 2205.14135; Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783
(section 3.3.2: the zigzag order).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, T, causal_attention, make_batch, next_token_loss

SEQUENCES = 4  # in a batch: each rank has a part of all of them
ALL = slice(None)  # as an index: all queries, keys or numbers
pairs: list[int] = []  # for each block in forward: pairs of a query and a key that it may see


def compute_scores(q, k, causal):
    """All queries times all keys, by the root of D. A key that a query must not see: -infinity."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)  # above the diagonal
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def count_pairs(scores):
    """Pairs of a query and a key that it may see, in one head. The others have -infinity."""
    return int(scores[0, 0].isfinite().sum())


def attend(q, k, v, causal):
    """Attention to a block of keys, and lse: the logarithm of the sum its softmax divides by.
    Counts its pairs in ``pairs``."""
    scores = compute_scores(q, k, causal)
    pairs.append(count_pairs(scores))
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def merge(out, lse, block_out, block_lse):
    """Attention to two sets of keys together. No exponent is above 0, so nothing overflows."""
    both_lse = torch.logaddexp(lse, block_lse)
    return out * (lse - both_lse).exp() + block_out * (block_lse - both_lse).exp(), both_lse


def attend_backward(q, k, v, dout, lse, delta, causal):
    """What a block adds to the gradients of q, k and v. lse and delta are of all blocks' keys."""
    weights = (compute_scores(q, k, causal) - lse).exp()
    dscores = weights * (dout @ v.transpose(-1, -2) - delta)
    dproducts = dscores / q.shape[-1] ** 0.5  # of queries and keys: scores are their quotient
    return dproducts @ k, dproducts.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout


def pass_on(block):
    """Send the block to the next rank. Returns the block of the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(block)
    messages = [
        dist.P2POp(dist.isend, block, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()
    return received


class RingAttention(torch.autograd.Function):
    """Causal attention to the tokens of all ranks. Takes and returns [B, heads, T / N, D].

    visible(rank, source) returns two slices: which of our queries see keys of the source rank, and
    which keys. Each of these queries sees each of these keys, so only our own block needs a mask.
    """

    @staticmethod
    def forward(ctx, q, k, v, visible):
        rank, size = dist.get_rank(), dist.get_world_size()
        out, lse = attend(q, k, v, causal=True)  # hop 0: our own block
        block = torch.stack([k, v])
        for hop in range(1, size):
            block = pass_on(block)
            queries, keys = visible(rank, (rank - hop) % size)
            block_k, block_v = block[..., keys, :]
            rows = (..., queries, ALL)  # an index: those of our queries that see these keys
            out[rows], lse[rows] = merge(
                out[rows], lse[rows], *attend(q[rows], block_k, block_v, causal=False)
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible = visible
        return out

    @staticmethod
    def backward(ctx, dout):
        """The blocks go round again, now with their gradients. Each rank adds its part to these."""
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = attend_backward(q, k, v, dout, lse, delta, causal=True)
        block = torch.stack([k, v, dk, dv])
        for hop in range(1, size):
            block = pass_on(block)
            queries, keys = ctx.visible(rank, (rank - hop) % size)
            rows = (..., queries, ALL)
            block_k, block_v = block[:2, ..., keys, :]
            added_dq, added_dk, added_dv = attend_backward(
                q[rows], block_k, block_v, dout[rows], lse[rows], delta[rows], causal=False
            )
            dq[rows] += added_dq
            block[2:, ..., keys, :] += torch.stack([added_dk, added_dv])
        if size > 1:
            dk, dv = pass_on(block[2:])  # the last hop takes the gradients to their owner
        return dq, dk, dv, None


def compute_gradients(attention, batch, positions):
    """The gradients of a batch [SEQUENCES, T + 1]. This rank computes the tokens at positions."""
    torch.manual_seed(1234)  # the same parameters on every rank, and for every method
    gpt = GPT(attention)
    logits, targets = gpt(batch[:, positions], positions), batch[:, positions + 1]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss / (SEQUENCES * T)).backward()  # the mean is over the tokens of all ranks
    gradients = parameters_to_vector([param.grad for param in gpt.parameters()])
    dist.all_reduce(gradients)  # the sum: each rank has the gradients of its tokens
    return gradients


def ring_gradients(visible, batch, positions):
    return compute_gradients(
        lambda q, k, v: RingAttention.apply(q, k, v, visible), batch, positions
    )


def contiguous_visible(rank, source):
    """All of our queries see all keys of an earlier rank. None sees a key of a later rank."""
    queries = ALL if source < rank else slice(0)
    return queries, ALL


def contiguous(batch, rank, size):
    """Ring attention. Rank 0 has the beginning of a sequence, and the last rank its end."""
    positions = torch.arange(T).chunk(size)[rank]
    return ring_gradients(contiguous_visible, batch, positions), positions


def zigzag_positions(rank, size):
    """Rank r has two of 2N chunks: an early one, r, and a late one, 2N - 1 - r."""
    chunks = torch.arange(T).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def zigzag_visible(rank, source):
    """All of our queries see an earlier rank's early chunk. Only our late chunk sees the keys of a
    later rank: both of its chunks."""
    chunk = T // (2 * dist.get_world_size())  # tokens in each of the two chunks of a rank
    if source < rank:
        return ALL, slice(chunk)
    return slice(chunk, None), ALL


def zigzag(batch, rank, size):
    """Ring attention with the same work on each rank."""
    positions = zigzag_positions(rank, size)
    return ring_gradients(zigzag_visible, batch, positions), positions


def masked_attention(q, k, v):
    """Attention by the function that context_parallel replaces. On CPUs, the library gathers all
    keys, and must be given the mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    keys = torch.cat([zigzag_positions(source, size) for source in range(size)])  # positions, [T]
    mask = keys <= zigzag_positions(rank, size).unsqueeze(1)  # [T / N, T]
    with sdpa_kernel(SDPBackend.MATH):
        # the library takes dimension 2 of q, k, v and mask for this rank's part of the tokens
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def library(batch, rank, size):
    """PyTorch's context_parallel: it replaces F.scaled_dot_product_attention."""
    positions = torch.arange(T)
    mesh = init_device_mesh(torch.get_default_device().type, (size,))  # "cpu" or "cuda"
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        # positions has only this rank's until the block ends, so a copy is returned
        return compute_gradients(masked_attention, batch, positions), positions.clone()


def run(rank, size):
    assert T % (2 * size) == 0, f"2N chunks must be equal: choose a number that divides {T // 2}"
    batch = make_batch(SEQUENCES, seed=0)
    torch.manual_seed(1234)  # the same parameters on every rank, and for every method
    gpt = GPT(causal_attention)
    next_token_loss(gpt, batch).backward()
    expected = parameters_to_vector([param.grad for param in gpt.parameters()])
    wrong = []
    for method in (contiguous, zigzag, library):
        pairs.clear()
        gradients, positions = method(batch, rank, size)
        difference = (gradients - expected).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        print(  # the pairs are of the first layer; all layers have the same
            f"Rank {rank}, {method.__name__}: {' '.join(map(str, positions.tolist()))}, "
            f"pairs {'+'.join(map(str, pairs[:size])) or 'not known'}, "
            f"difference {difference:.0e}"
        )
        if not difference < 1e-9:
            wrong.append(method.__name__)
    assert not wrong, f"not the gradients of one process: {', '.join(wrong)}"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # so that gloo's threads have freed the last tensors before Python ends
    dist.destroy_process_group()
