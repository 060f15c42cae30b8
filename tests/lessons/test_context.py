"""context: attention over a sequence that is cut is one process's, and torch's own ring
attention."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from torch import Tensor

from playground import RankFailed, launch
from playground.algorithms.traffic import Traffic
from playground.lessons.context import experiment
from playground.lessons.context.lesson import (
    CountSent,
    attend,
    attend_backward,
    compare,
    position_ids,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)
from playground.lessons.context.page import ORDERS, ContextSettings, check_all, ring_forms
from playground.lessons.tensor.lesson import GPTConfig, copying, new_gpt, shard_gpt
from playground.runtime.errors import UsageError
from playground.runtime.tap import observing
from playground.training.gpt_config import LAYERS, LENGTH, WIDTH
from playground.training.one_process import EXACT

ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 3, 4))]
)
def test_training_is_one_process_s_and_holds_and_sends_what_its_closed_forms_say(
    world: Worlds, size: int
) -> None:
    settings = ContextSettings(size=size, steps=1, batch_size=6, lengths=(96,))
    check_all(world(size).run(experiment.run, settings), settings)


@pytest.mark.stress
def test_without_an_exchange_copying_is_not_learned(world: Worlds) -> None:
    ways = world(2).run(experiment.run, ContextSettings(size=2, lengths=()))[0].ways
    assert max(ways["ring"].last, ways["ulysses"].last) < 0.6 < 3.6 < ways["alone"].last


def new_heads(tensors: int, length: int) -> list[Tensor]:
    return [
        *torch.randn(tensors, 2, 12, length, 4, generator=torch.Generator().manual_seed(3)).double()
    ]


def differences(rank: int, size: int, length: int) -> dict[tuple[str, bool, bool], float]:
    """The largest difference of the output and the three gradients, by way, order and whether
    attention is causal."""
    found = {}
    for way, attention in ATTENTION.items():
        for zigzag, causal in ((True, True), (True, False), (False, True), (False, False)):
            *whole, dout = new_heads(4, length)
            mine = position_ids(length, size, rank, zigzag)
            own = [each[:, :, mine].requires_grad_() for each in whole]
            query, key, value = (each.requires_grad_() for each in whole)
            expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            output = partial(attention, zigzag=zigzag, causal=causal)(*own)
            expected.backward(dout)
            output.backward(dout[:, :, mine])
            pairs = [
                (output, expected),
                *((one.grad, each.grad) for one, each in zip(own, whole, strict=True)),
            ]
            found[way, zigzag, causal] = max(
                (one - each[:, :, mine]).abs().max().item() for one, each in pairs
            )
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_is_one_process_s_forward_and_backward(world: Worlds, size: int) -> None:
    for length in (2 * size, 10 * size):
        for found in world(size).run(differences, length):
            assert {key: value for key, value in found.items() if not value <= EXACT} == {}


def test_the_gradients_of_a_block_are_autograd_s() -> None:
    q, k, v, dout = new_heads(4, 5)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask in (None, visible):
        leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        expected = partial(F.scaled_dot_product_attention, attn_mask=mask)(*leaves)
        expected.backward(dout)
        out, lse = attend(q, k, v, mask)
        found = attend_backward(q, k, v, mask, dout, lse, (dout * out).sum(-1, keepdim=True))
        pairs = [(out, expected), *zip(found, (each.grad for each in leaves), strict=True)]
        assert max((one - other).abs().max() for one, other in pairs) <= EXACT


def print_comparison(rank: int, size: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        compare(rank, size)
    return printed.getvalue()


@pytest.mark.parametrize(
    "size", [1, 2, *(pytest.param(size, marks=pytest.mark.stress) for size in (3, 4))]
)
def test_the_board_prints_that_nothing_differs_and_what_attention_sends(
    world: Worlds, size: int
) -> None:
    """In float64: six tensors of [batch, length, width] for 2 layers, by the closed forms."""
    hidden = 8 * 4 * LENGTH * WIDTH
    sent = {
        "ring": round(ring_forms(hidden, size)["sent"]),
        "ulysses": 8 * (size - 1) * hidden // size**2,
    }
    expected = [
        f"{f'{order} {name}_attention':28} 0.0000000000 from one process, {LAYERS * count:,} bytes "
        "sent"
        for order in ORDERS
        for name, count in sent.items()
    ]
    first, *others = world(size).run(print_comparison)
    assert first.splitlines() == expected
    assert set(others) <= {""}


def count_in_two_ways(rank: int, size: int) -> tuple[float, int]:
    """Bytes sent by a ring and by Ulysses, as the tap counts them and as the board does."""
    heads, traffic = [each.requires_grad_() for each in new_heads(3, 8)], Traffic()
    with observing(traffic), CountSent() as sent:
        for attention in ATTENTION.values():
            attention(*heads).sum().backward()
    return traffic.sent, sent.count


@pytest.mark.parametrize("size", [2, 3])
def test_the_board_counts_the_bytes_that_the_tap_counts(world: Worlds, size: int) -> None:
    for by_tap, by_board in world(size).run(count_in_two_ways):
        assert by_tap == by_board > 0


def torchs_ring(rank: int, size: int, length: int, zigzag: bool) -> float:
    """The largest difference from torch's ring attention, forward and backward."""
    theirs, aten = importlib.import_module(PRIVATE), torch.ops.aten
    theirs._cp_options.convert_to_f32 = False
    theirs._cp_options.enable_load_balance = zigzag
    mine = position_ids(length, size, rank, zigzag)
    query, key, value, dout = (each[:, :, mine].contiguous() for each in new_heads(4, length))
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}")
        for end in ("", "_backward")
    )
    world, causal = dist.group.WORLD, {"is_causal": True}
    output, total = theirs._templated_ring_attention(world, 2, forward, query, key, value, **causal)
    about = (query, key, value, output, total)
    gradients = theirs._templated_ring_attention_backward(
        world, 2, backward, dout, "grad_out", *about, **causal, dropout_p=0.0
    )
    own = [each.requires_grad_() for each in (query, key, value)]
    ours = partial(ring_attention, zigzag=zigzag)(*own)
    ours.backward(dout)
    pairs = zip((output, *gradients), (ours, *(each.grad for each in own)), strict=True)
    return max((their - our).abs().max().item() for their, our in pairs)


PRIVATE = "torch.distributed.tensor.experimental._context_parallel._attention"
"""Ring attention for `context_parallel`, which CPUs cannot run whole. Its names are not public."""


@pytest.mark.parametrize("zigzag", [True, False])
def test_torchs_private_ring_attention_agrees(world: Worlds, zigzag: bool) -> None:
    if not hasattr(pytest.importorskip(PRIVATE), "_templated_ring_attention"):
        pytest.skip("this torch has no _templated_ring_attention: it is private, and may go")
    assert max(world(2).run(torchs_ring, 24, zigzag)) <= EXACT


def cut_both(rank: int, size: int) -> float:
    """Two by two ranks, heads cut over pairs of neighbours, sequences over the others: the
    differences of logits."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    heads, sequences, found = groups[rank // 2], groups[2 + rank % 2], []
    tokens, _ = copying(2, torch.Generator().manual_seed(3))
    for attention in ATTENTION.values():
        whole = new_gpt(GPTConfig(), 1).double()
        model = copy.deepcopy(whole)
        shard_gpt(model, heads)
        shard_sequence(model, sequences, attention=attention)
        mine = position_ids(tokens.shape[1], 2, rank // 2, zigzag=True)
        logits = model(tokens[:, mine])
        logits.sum().backward()
        found.append((logits - whole(tokens)[:, mine].chunk(2, -1)[rank % 2]).abs().max().item())
    return max(found)


def test_heads_and_sequences_are_cut_over_groups_of_their_own(world: Worlds) -> None:
    assert max(world(4).run(cut_both)) <= EXACT


def be_refused(rank: int, size: int) -> None:
    with pytest.raises(
        ValueError,
        match="6 tokens cannot be split into 4 equal chunks: choose or pad to a multiple of 4",
    ):
        ring_attention(*torch.zeros(3, 1, 4, 3, 2))
    with pytest.raises(ValueError, match="3 heads for 2 ranks: choose a divisor of 3"):
        ulysses_attention(*torch.zeros(3, 1, 3, 4, 2))


def test_a_sequence_or_heads_that_cannot_be_shared_are_refused(world: Worlds) -> None:
    world(2).run(be_refused)
    with pytest.raises(UsageError, match="5 ranks for 12 heads"):
        ContextSettings(size=5)


def die_in_backward(rank: int, size: int) -> None:
    query = torch.zeros(1, 1, 4, 2, requires_grad=True)
    output = ring_attention(query, query, query)
    if rank == 1:
        output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    output.sum().backward()


def test_a_rank_that_is_killed_in_backward_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        launch(die_in_backward, 2)
