"""Judges of the exercises on context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from playground.exercises.cases import Case, Cases, counting, predict
from playground.lessons.context.ulysses import ulysses
from playground.training.context_parallel import attend, attend_backward, ring_attention
from playground.ui.units import plural

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
    """Any positions will do that share the work equally: pairs of a query and a key that it sees
    are counted, over all ranks."""
    for chunk in (1, 2, 5):
        length, found = 2 * size * chunk, list[list[int]]()
        yield Case(
            plural(length, "token"),
            (),
            held=found,
            combine=partial(look_at_positions, length),
            expected={
                "positions on no rank": "none",
                "positions on several ranks": "none",
                "runs of positions": "at most 2 on each rank",
                "their order on each rank": "ascending",
                "work of the ranks, in pairs": [length * (length + 1) // 2 // size] * size,
            },
            is_coded=False,
            run=partial(ask_for_positions, rank, size, length, found),
            most_moved=0,
        )


def ask_for_positions(
    rank: int, size: int, length: int, found: list[list[int]], function: Callable[..., torch.Tensor]
) -> None:
    found[:] = [torch.as_tensor(function(rank, size, length)).tolist()]


def look_at_positions(length: int, everyones: list[list[list[int]]]) -> dict[str, object]:
    """Which positions are missing or twice there, and the work of each rank: its queries' keys."""
    found = [each for [each] in everyones]
    all_of_them = [position for each in found for position in each]
    runs = max(
        sum(after != before + 1 for before, after in pairwise([-2, *each])) for each in found
    )
    return {
        "positions on no rank": name_all({*range(length)} - {*all_of_them}),
        "positions on several ranks": name_all(
            position for position, times in Counter(all_of_them).items() if times > 1
        ),
        "runs of positions": "at most 2 on each rank" if runs <= 2 else f"{runs}",
        "their order on each rank": "ascending" if found == [*map(sorted, found)] else "another",
        "work of the ranks, in pairs": [sum(position + 1 for position in each) for each in found],
    }


def name_all(positions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(positions))) or "none"


def attention_traffic(rank: int, size: int, seed: int) -> Cases:
    """What a ring and Ulysses send, forward and backward, in float32."""
    for heads, length, head_width in ((12, 24, 2), (24, 48, 3)):
        parts = []
        for attention in (ring_attention, ulysses):
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


def ring_backward(rank: int, size: int, seed: int) -> Cases:
    """Gradients of attention to the keys of all ranks. One process is the oracle."""
    for tokens in (1, 3):
        torch.manual_seed(seed)
        whole = [torch.randn(tokens * size, WIDTH).double().requires_grad_() for _ in range(3)]
        dout = torch.randn(tokens * size, WIDTH).double()
        all_queries, all_keys, all_values = (each.detach() for each in whole)
        out, lse = attend(all_queries, all_keys, all_values)
        F.scaled_dot_product_attention(*(each[None] for each in whole))[0].backward(dout)
        due = tuple(each.grad.chunk(size)[rank] for each in whole)
        query, key, value, own_out, own_lse, own_dout = (
            each.detach().chunk(size)[rank].clone() for each in (*whole, out, lse, dout)
        )
        delta = (own_dout * own_out).sum(-1, keepdim=True)
        backward = partial(backward_of_query, query, own_dout, own_lse, delta)
        yield Case(
            f"{plural(tokens, 'token')} on each rank",
            (key, value, backward),
            due,
            names=[f"gradient of the {name}" for name in ("query", "key", "value")],
            is_coded=False,
            most_moved=4 * size * key.numel(),
        )


def backward_of_query(
    query: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    key: torch.Tensor, value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attend_backward` as the task calls it: with keys and values only."""
    return attend_backward(query, key, value, dout, lse, delta)
