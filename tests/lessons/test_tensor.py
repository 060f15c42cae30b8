"""tensor: four ways to divide one training, each of which holds, saves and sends what the chapter's
formulas say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Run, Worlds
from one_process import EXACT
from torch import nn

from playground.base.remote import file_of
from playground.lessons import LESSONS
from playground.lessons.gpt import GPT, LAYERS, C, T, V, make_batch, next_token_loss

WAYS = ("tensor_parallel", "vocabulary_parallel", "sequence_parallel", "by_library")
BATCH, STEPS = 8, 3
TENSOR = BATCH * T * C * 8
"""Bytes of a tensor [B, T, C] in float64."""
BLOCKS = LAYERS * (12 * C**2 + 7 * C)
"""Parameters of the blocks that are cut: the matrices, and the biases of column-parallel layers."""
WORDS = (2 * V + T) * C + V
"""Parameters that are cut from `vocabulary_parallel` on: embeddings and head."""
NORMS, BIASES = (2 * LAYERS + 1) * 2 * C, LAYERS * 2 * C
"""Parameters that are not cut: those of norms, and biases of row-parallel layers."""


def train_alone() -> GPT:
    """One process: the model that it has trained."""
    torch.manual_seed(1234)
    gpt = GPT()
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        next_token_loss(gpt, make_batch(BATCH, seed=step)).backward()
        optimizer.step()
    return gpt


def difference_of(gpt: nn.Module, expected: GPT) -> float:
    """The largest one of a parameter, or of this rank's part of it."""
    whole = dict(expected.named_parameters())
    found = [0.0]
    for name, param in gpt.named_parameters():
        name = name.replace(".block.", ".")  # a ParallelBlock has a block
        if hasattr(param, "full_tensor"):
            found.append((param.full_tensor() - whole[name]).abs().max().item())
        else:
            cut = [n < all_ for n, all_ in zip(param.shape, whole[name].shape, strict=True)]
            parts = whole[name].chunk(dist.get_world_size(), cut.index(True) if any(cut) else 0)
            part = parts[dist.get_rank()] if any(cut) else whole[name]
            found.append((param - part).abs().max().item())
    return max(found)


def train_by_every_way(rank: int, size: int) -> dict[str, tuple[float, int, float]]:
    """By way: the largest difference of a parameter from one process, the parameters of this rank,
    and what forward saves for each block, in tensors [B, T, C]."""
    # in the rank: what DTensors import leaves a message at the end of a process forked after it
    from playground.lessons.tensor import lesson

    tensor: Any = lesson
    torch.set_default_dtype(torch.float64)
    tensor.STEPS = STEPS
    try:
        assert tensor.BATCH_SIZE == BATCH
        expected = train_alone()
        found = {}
        for way in WAYS:
            torch.manual_seed(1234)
            gpt = GPT()
            _, saved = tensor.train(gpt, getattr(tensor, way)(gpt))
            params = [*gpt.parameters()]
            kept = 1024 * (tensor.count_kib([*params, *saved]) - tensor.count_kib(params))
            count = round(tensor.count_kib(params) * 1024 / 8)
            found[way] = difference_of(gpt, expected), count, kept / TENSOR / LAYERS
        return found
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_way_is_one_training_and_holds_what_the_chapter_says(
    size: int, world: Worlds
) -> None:
    for rank, found in enumerate(world(size, timeout=300).run(train_by_every_way)):
        for way, (difference, count, saved) in found.items():
            assert difference <= EXACT, way
            words = WORDS if way == "tensor_parallel" else WORDS // size
            biases = BIASES if rank == 0 or way == "by_library" else 0
            assert count == BLOCKS // size + words + NORMS + biases, way
            sequence = way in ("sequence_parallel", "by_library")
            widths = 2 + 14 / size if sequence else 4 + 12 / size
            head = 1 + 1 / size if sequence else 2  # its norm's output and input
            assert 0 <= saved - widths - head / LAYERS <= 0.5, way  # and the logits, of few words


def exchange(rank: int, size: int) -> list[bool]:
    """For each of the chapter's two tables, whether output and gradient are as all ranks' inputs
    say."""
    from playground.lessons.tensor import lesson

    tensor: Any = lesson
    inputs = [
        torch.randn(2, 2 * size, 3, generator=torch.Generator().manual_seed(r)).double()
        for r in range(size)
    ]
    total, own, found = torch.stack(inputs).sum(0), slice(2 * rank, 2 * rank + 2), []
    gathered = torch.cat([each[:, 2 * r : 2 * r + 2] for r, each in enumerate(inputs)], 1)
    for function, given, gradient, output, of_given in (
        (tensor.f, inputs[rank], inputs[rank], inputs[rank], total),
        (tensor.g, inputs[rank], inputs[rank], total, inputs[rank]),
        (tensor.gather_tokens, inputs[rank][:, own], inputs[rank], gathered, total[:, own]),
        (tensor.scatter_sum, inputs[rank], inputs[rank][:, own], total[:, own], gathered),
    ):
        x = given.clone().requires_grad_()
        exchanged = function(x)
        exchanged.backward(gradient)
        found += [torch.allclose(exchanged, output), torch.allclose(x.grad, of_given)]
        found += [x.equal(given)]  # autograd may still need it
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_sent_forward_is_mirrored_in_backward(size: int, world: Worlds) -> None:
    for found in world(size).run(exchange):
        assert found == [True] * 12


@pytest.mark.parametrize("size", [2, 4])
def test_the_profile_has_the_bytes_of_the_chapter_s_formula(
    size: int, run_cli: Run, tmp_path: Path
) -> None:
    """Of all ranks: four tensors for each block, two more for embedding and head, and two numbers
    for each token in the two rows that have a vocabulary's loss."""
    file = tmp_path / "profile.json"
    ran = run_cli("tensor", "-n", size, "--steps", 2, "--profile", file)
    assert ran.code == 0, ran.err
    rows = {
        (row["function"], row["operation"]): row
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if row["file"].endswith("tensor/lesson.py")
    }
    share, tensors = 2 * (size - 1) * 2, 4 * LAYERS + 2  # (N - 1) / N of N ranks, two steps
    exchanged = share // 2 * tensors * TENSOR
    sums = share * (2 * tensors - 2) * TENSOR + share * 2 * 2 * BATCH * T * 8
    norms = share * NORMS * 8
    assert rows["all_reduce", "all_reduce"]["sent"] == sums
    assert rows["all_gather", "all_gather"]["sent"] == exchanged
    assert rows["reduce_scatter", "reduce_scatter"]["sent"] == exchanged
    assert rows["<lambda>", "all_reduce"]["sent"] == norms


@pytest.mark.torch(2, 14)
def test_what_is_held_and_the_losses_are_those_of_the_docstring(run_cli: Run) -> None:
    ran = run_cli("tensor")
    assert ran.code == 0, ran.err
    source = file_of(LESSONS["tensor"].module).read_text(encoding="utf-8")
    rows = re.findall(r"^(?:    )?(\w+ .* loss \S+), difference", source + ran.out, re.MULTILINE)
    assert len(rows) == 10
    assert rows[:5] == rows[5:]


def test_heads_that_cannot_be_divided_are_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("tensor", "-n", 5)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "12 attention heads cannot be divided among 5 ranks" in ran.err
