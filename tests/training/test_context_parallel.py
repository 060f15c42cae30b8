"""The machine's ring attention is one process's, and block for block the lesson's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Worlds
from one_process import EXACT
from torch import Tensor

from playground.exercises.cases import counting
from playground.training.context_parallel import attend, attend_backward, ring_attention


def new_heads(tensors: int, length: int) -> list[Tensor]:
    return [
        *torch.randn(tensors, 2, 12, length, 4, generator=torch.Generator().manual_seed(3)).double()
    ]


def compare(rank: int, size: int, length: int) -> tuple[float, float, float]:
    """The largest difference of the output and the three gradients from one process; the bytes that
    the ring sends, and the lesson's ring."""
    from playground.lessons.context import lesson

    context: Any = lesson
    *whole, dout = new_heads(4, length)
    own = [each.chunk(size, 2)[rank].requires_grad_() for each in whole]
    query, key, value = (each.requires_grad_() for each in whole)
    expected = F.scaled_dot_product_attention(query, key, value)
    expected.backward(dout)
    with counting() as ours:
        output = ring_attention(*own)
        output.backward(dout.chunk(size, 2)[rank])
    pairs = [(output, expected.chunk(size, 2)[rank])]
    pairs += [
        (part.grad, each.grad.chunk(size, 2)[rank]) for part, each in zip(own, whole, strict=True)
    ]
    difference = max((one - each).abs().max().item() for one, each in pairs)
    with counting() as theirs:
        attended = context.RingAttention.apply(*own, context.contiguous_visible)
        attended.backward(dout.chunk(size, 2)[rank])
    return difference, ours.sent, theirs.sent


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(n, marks=pytest.mark.stress) for n in (1, 3, 4))]
)
def test_attention_is_one_process_s_and_sends_what_the_lesson_s_does(
    world: Worlds, size: int
) -> None:
    for length in (2 * size, 24):
        for difference, ours, theirs in world(size, timeout=300).run(compare, length):
            assert difference <= EXACT
            assert ours == theirs


def test_a_block_is_the_lesson_s() -> None:
    from playground.lessons.context import lesson

    context: Any = lesson
    q, k, v, dout = new_heads(4, 5)
    out, lse = attend(q, k, v)
    delta = (dout * out).sum(-1, keepdim=True)
    found = [out, lse, *attend_backward(q, k, v, dout, lse, delta)]
    expected = [
        *context.attend(q, k, v, False),
        *context.attend_backward(q, k, v, dout, lse, delta, False),
    ]
    assert (
        max((one - other).abs().max() for one, other in zip(found, expected, strict=True)) <= EXACT
    )
