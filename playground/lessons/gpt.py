"""A small GPT, and sequences to train it on. Given: read it once, other lessons divide this model.

Shapes: B sequences of T tokens, C channels, H attention heads of D = C / H channels each,
V tokens in the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

V, T, C, H = 48, 24, 96, 12  # 2, 3 and 4 divide all of them
LAYERS = 2


def causal_attention(q, k, v):
    """The values' mean, weighted by products of queries and keys. No token sees a later one.

    Takes and returns [B, heads, T, D].
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Each token's output is a weighted mean of the values of all tokens up to it.

    Maps [B, T, C] to [B, T, C].
    """

    def __init__(self, attend=causal_attention):
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(C, 3 * C)  # head by head: a slice of the outputs is a set of heads
        self.out = nn.Linear(C, C)

    def forward(self, x):
        # [B, T, heads, 3, D]; -1 and not H: in a later chapter, tensor, a rank has fewer heads
        qkv = self.qkv(x).unflatten(-1, (-1, 3, C // H))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [B, heads, T, D] each
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, applied to each token separately. Maps [B, T, C] to [B, T, C]."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(C, 4 * C)
        self.down = nn.Linear(4 * C, C)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then the MLP. Each adds its output to its input. Maps [B, T, C] to [B, T, C]."""

    def __init__(self, attend=causal_attention):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(C), Attention(attend)
        self.norm2, self.mlp = nn.LayerNorm(C), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps tokens [B, T] to logits [B, T, V]."""

    def __init__(self, attend=causal_attention):
        super().__init__()
        self.token_embedding = nn.Embedding(V, C)
        self.position_embedding = nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V)

    def forward(self, tokens, positions=None):
        if positions is None:  # the tokens are the beginning of the sequence
            positions = torch.arange(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x))


def make_batch(batch_size, seed):
    """Arithmetic sequences [B, T + 1]: start, start + stride, start + 2 stride, … modulo V.

    The model must infer the stride from earlier tokens.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    start = torch.randint(V, (batch_size, 1), generator=generator)
    stride = torch.randint(1, 8, (batch_size, 1), generator=generator)
    return (start + stride * torch.arange(T + 1)) % V


def next_token_loss(model, batch):
    """The mean cross-entropy of the next token. A model that guesses has ln V = 3.87."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
