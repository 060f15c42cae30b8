"""Judges of the exercises on context."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from playground.exercises.cases import Case, Cases, counting, predict
from playground.exercises.exercise import count
from playground.lessons.context.lesson import ring_attention, ulysses_attention

WIDTH = 3


def merge(rank: int, size: int, seed: int) -> Cases:
    """Attention to the keys of all ranks. One process is the oracle."""
    for about, tokens, scale in (
        ("1 token", 1, 1.0),
        ("3 tokens", 3, 2.0),
        ("scores beyond 1,000", 4, 60.0),
    ):
        torch.manual_seed(seed)
        whole = scale * torch.randn(3, tokens * size, WIDTH).double()
        expected = F.scaled_dot_product_attention(*whole.unsqueeze(1)).squeeze(0)
        mine = [each.chunk(size)[rank].clone() for each in (*whole, expected)]
        yield Case(f"{about} on each rank", tuple(mine[:3]), mine[3], is_coded=False)


def zigzag(rank: int, size: int, seed: int) -> Cases:
    """Positions, and what each of them sees of the block that is here after some hops."""
    for chunk in (1, 2, 3):
        chunks = [[*range(start, start + chunk)] for start in range(0, 2 * size * chunk, chunk)]
        positions = [chunks[each] + chunks[-1 - each] for each in range(size)]
        for hop in range(size):
            sees = [[key <= query for key in positions[rank - hop]] for query in positions[rank]]
            about = f"{count(2 * chunk * size, 'token')}, after {count(hop, 'hop')}"
            mine = torch.tensor(positions[rank])
            yield Case(about, (2 * chunk * size, hop), (mine, torch.tensor(sees)), is_coded=False)


def attention_traffic(rank: int, size: int, seed: int) -> Cases:
    """What the board's two attentions send, forward and backward, in float32."""
    for heads, length, head_width in ((12, 24, 2), (24, 48, 3)):
        parts = []
        for attention in (ring_attention, ulysses_attention):
            shape = (1, heads, length // size, head_width)
            qkv = [torch.ones(shape, requires_grad=True) for _ in range(3)]
            with counting() as forward:
                output = attention(*qkv)
            with counting() as backward:
                output.sum().backward()
            parts.append((round(forward.sent), round(backward.sent)))
        (ring_forward, ring_backward), (ulysses_forward, ulysses_backward) = parts
        counted = {
            "ring_forward": ring_forward,
            "ring_backward": ring_backward,
            "ulysses_forward": ulysses_forward,
            "ulysses_backward": ulysses_backward,
        }
        about = f"{heads} heads of width {head_width}, {length} tokens"
        yield predict(about, (size, heads, length, head_width), counted)
