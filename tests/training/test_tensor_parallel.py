"""Tensor parallelism of the machine: what ranks exchange is what the lesson's do, and a sharded GPT
is the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Worlds
from one_process import EXACT
from sharded_functions import VocabParallelEmbedding, shard_gpt, vocab_parallel_cross_entropy
from torch import nn

from playground.training.tensor_parallel import (
    RowParallelLinear,
    all_gather,
    all_reduce,
    copy_to_region,
    gather_from_sequence_region,
    reduce_from_region,
    reduce_scatter,
    reduce_scatter_to_sequence_region,
    shard,
)
from playground.training.tiny_gpt import GPTConfig, copying, new_gpt


def exchange_tokens(rank: int, size: int) -> list[bool]:
    """For each function of the module's table, whether output and gradient are as all ranks' inputs
    tell."""
    inputs = [
        torch.randn(2, 2 * size, 3, generator=torch.Generator().manual_seed(r)).double()
        for r in range(size)
    ]
    total, own, found = torch.stack(inputs).sum(0), slice(2 * rank, 2 * rank + 2), []
    gathered = torch.cat([each[:, 2 * r : 2 * r + 2] for r, each in enumerate(inputs)], 1)
    for function, given, gradient, output, of_given in (
        (copy_to_region, inputs[rank], inputs[rank], inputs[rank], total),
        (reduce_from_region, inputs[rank], inputs[rank], total, inputs[rank]),
        (gather_from_sequence_region, inputs[rank][:, own], inputs[rank], gathered, total[:, own]),
        (
            reduce_scatter_to_sequence_region,
            inputs[rank],
            inputs[rank][:, own],
            total[:, own],
            gathered,
        ),
    ):
        tensor = given.clone().requires_grad_()
        exchanged = function(tensor)
        exchanged.backward(gradient)
        found += [torch.allclose(exchanged, output), torch.allclose(tensor.grad, of_given)]
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_exchanged_forward_is_mirrored_in_backward(world: Worlds, size: int) -> None:
    for found in world(size).run(exchange_tokens):
        assert found == [True] * 8


def difference_of_a_loss(
    rank: int, size: int, logits: torch.Tensor, targets: torch.Tensor
) -> float:
    """From `F.cross_entropy`, of the loss and of the gradients; NaN only if both are."""
    whole = logits.clone().requires_grad_()
    part = logits.chunk(size, -1)[rank].clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    found = vocab_parallel_cross_entropy(part, targets)
    expected.backward()
    found.backward()
    pairs = [(found, expected), (part.grad, whole.grad.chunk(size, -1)[rank])]
    return max(
        (one - other).abs().nan_to_num(1.0 - one.equal(other)).max().item() for one, other in pairs
    )


def reach_the_edges(rank: int, size: int) -> None:
    vocabulary = 3 * size
    torch.manual_seed(1)
    embedding = nn.Embedding(vocabulary, 2).double()
    embedding.weight.data[::3] = torch.inf  # of others' tokens, nothing may come through
    ids = torch.tensor([[1, vocabulary - 1]])
    assert VocabParallelEmbedding(embedding)(ids).equal(embedding(ids))
    logits = torch.randn(2, 3, vocabulary).double()
    targets = torch.tensor([[0, -100, vocabulary - 1], [3, 1, 2]])
    assert difference_of_a_loss(rank, size, logits, targets) <= EXACT
    logits[1, :, 0] = -torch.inf  # a word that is masked
    assert difference_of_a_loss(rank, size, logits, targets) <= EXACT
    assert difference_of_a_loss(rank, size, 1e4 * logits.clamp(min=-9), targets) <= EXACT
    ignored = torch.full_like(targets, -100)
    # as cross_entropy's
    assert vocab_parallel_cross_entropy(logits.chunk(size, -1)[rank], ignored).isnan()
    for outside in (-1, vocabulary, -101):
        with pytest.raises(
            IndexError, match=f"{outside} is out of range: ids are 0 to {vocabulary - 1}"
        ):
            VocabParallelEmbedding(embedding)(torch.tensor([[0, outside]]))
        with pytest.raises(IndexError, match=f"{outside} is out of range"):
            vocab_parallel_cross_entropy(
                logits.chunk(size, -1)[rank], targets.where(targets != 1, outside)
            )
    for exchange in (all_reduce, all_gather, reduce_scatter):
        given = torch.ones(1, size, 2)
        exchange(given)
        # what is handed on may be autograd's, and another layer's gradient, too
        assert given.eq(1).all()
    local = shard(torch.zeros(size, 2), 0)
    # the unsharded parameter is not kept for its sake
    assert local.untyped_storage().nbytes() == local.nbytes
    linear, given = nn.Linear(2 * size, 3, bias=False).double(), torch.randn(1, 2 * size).double()
    found = RowParallelLinear(linear)(given.chunk(size, -1)[rank])
    assert (found - linear(given)).abs().max() <= EXACT
    with pytest.raises(
        ValueError, match=f"{size + 1} tokens for {size} ranks: pad to a multiple of {size}"
    ):
        reduce_scatter_to_sequence_region(torch.zeros(1, size + 1, 2))
    with pytest.raises(
        ValueError, match=f"{size + 1} cannot be sharded over {size} ranks: choose a divisor"
    ):
        shard(torch.zeros(size + 1, 2), 0)


def test_words_beyond_the_vocabulary_and_what_is_ignored_are_as_in_torch(world: Worlds) -> None:
    world(2).run(reach_the_edges)


def be_the_lesson_s(rank: int, size: int) -> list[bool]:
    """For each function of the module's table, whether output and gradient are those of the
    lesson's, which adds in another order."""
    # in the rank: what DTensors import leaves a message at the end of a process forked after it
    from playground.lessons.tensor import lesson

    tensor: Any = lesson
    found = []
    for ours, theirs, tokens in (
        (copy_to_region, tensor.f, 2 * size),
        (reduce_from_region, tensor.g, 2 * size),
        (gather_from_sequence_region, tensor.gather_tokens, 2),
        (reduce_scatter_to_sequence_region, tensor.scatter_sum, 2 * size),
    ):
        torch.manual_seed(rank)
        given = [torch.randn(2, tokens, 3).double().requires_grad_() for _ in range(2)]
        given[1].data.copy_(given[0].data)
        one, other = ours(given[0]), theirs(given[1])
        dout = torch.randn_like(one)
        one.backward(dout)
        other.backward(dout)
        found += [torch.allclose(one, other), torch.allclose(given[0].grad, given[1].grad)]
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_exchanged_is_what_the_lesson_exchanges(world: Worlds, size: int) -> None:
    for found in world(size, timeout=300).run(be_the_lesson_s):
        assert found == [True] * 8


def difference_of_a_gpt(rank: int, size: int) -> float:
    """The largest one of a sharded GPT's logits from the whole one's, and of a gradient."""
    tokens, targets = copying(2, torch.Generator().manual_seed(3))
    whole, part = (new_gpt(GPTConfig(layers=1), 1).double() for _ in range(2))
    shard_gpt(part)
    F.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten()).backward()
    vocab_parallel_cross_entropy(part(tokens), targets).backward()
    found = [(part(tokens) - whole(tokens).chunk(size, -1)[rank]).abs().max()]
    for ours, theirs in zip(part.parameters(), whole.parameters(), strict=True):
        cut = [n < all_ for n, all_ in zip(ours.shape, theirs.shape, strict=True)]
        due = theirs.grad.chunk(size, cut.index(True))[rank] if any(cut) else theirs.grad
        found.append((ours.grad - due).abs().max())
    return float(max(found))


def test_a_sharded_gpt_is_the_whole_one(world: Worlds) -> None:
    assert max(world(2).run(difference_of_a_gpt)) <= EXACT
