"""Ulysses: between the layers, a rank has T / N tokens and all heads. In attention, a rank has all
tokens and H / N heads.

No head of attention needs another head. So two exchanges are enough. Before attention, a rank sends
each other rank the queries, keys and values of its own tokens, for the heads that the receiver
computes. So it receives all tokens, for the heads that it computes itself. After attention, the
exchange goes back.

    python -m playground run -n 4 playground/lessons/context/ulysses.py
    torchrun --nproc-per-node 4 ulysses.py

    ulysses: largest difference 4e-17

Source: Jacobs et al., DeepSpeed Ulysses, 2023, arXiv 2309.14509.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, H, T, causal_attention, make_batch, next_token_loss

SEQUENCES = 4  # in a batch: each rank has a part of all of them
HEADS, TOKENS = -3, -2  # dimensions of [B, heads, T, D], and of a stack of such tensors


class Exchange(torch.autograd.Function):
    """Cut a tensor along one dimension, a piece for each rank, and exchange the pieces.

    The received pieces are joined along another dimension. Backward is the exchange back.
    """

    @staticmethod
    def forward(ctx, tensor, cut, join):
        ctx.back = join, cut
        sent = torch.stack(tensor.chunk(dist.get_world_size(), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.back), None, None


def ulysses(q, k, v):
    """Causal attention to the tokens of all ranks. Takes and returns [B, H, T / N, D]."""
    q, k, v = Exchange.apply(torch.stack([q, k, v]), HEADS, TOKENS)  # [B, H / N, T, D] each
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return Exchange.apply(out, TOKENS, HEADS)


def compute_gradients(attention, batch, positions):
    """The gradients of a batch [SEQUENCES, T + 1], of which this rank has these positions. As in
    lesson.py: repeated, so that this file stands by itself."""
    torch.manual_seed(1234)  # the same parameters on every rank
    gpt = GPT(attention)
    logits, targets = gpt(batch[:, positions], positions), batch[:, positions + 1]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss / (SEQUENCES * T)).backward()  # the mean is over the tokens of all ranks
    gradients = parameters_to_vector([param.grad for param in gpt.parameters()])
    dist.all_reduce(gradients)  # the sum: each rank has the gradients of its tokens
    return gradients


def run(rank, size):
    assert H % size == 0, f"heads are divided equally: choose a number that divides {H}"
    batch = make_batch(SEQUENCES, seed=0)
    torch.manual_seed(1234)
    gpt = GPT(causal_attention)
    next_token_loss(gpt, batch).backward()
    expected = parameters_to_vector([param.grad for param in gpt.parameters()])
    positions = torch.arange(T).chunk(size)[rank]
    difference = (compute_gradients(ulysses, batch, positions) - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"ulysses: largest difference {difference:.0e}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # so that gloo's threads have freed the last tensors before Python ends
    dist.destroy_process_group()
