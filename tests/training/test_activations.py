"""What autograd keeps is counted once and given back, and checkpoints are torch's bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from playground.training import formulas
from playground.training.activations import Activations, Checkpoint
from playground.training.tiny_gpt import GPTConfig, batches, copying_loss, new_gpt


def test_memory_kept_by_several_operations_counts_once_and_is_given_back() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Activations(nn.Linear(1, 1)) as activations:
        total = (x * 2).exp()  # keeps its own result
        twice = (total * total).sum() + total.square().sum()  # keep the same memory
        assert activations.held == 4000
        twice.backward()
    del total, twice
    assert activations.held == 0
    assert activations.peak == 4000


def test_parameters_are_no_activations() -> None:
    linear = nn.Linear(100, 100)
    with Activations(linear) as activations:
        output = linear(torch.ones(1, 100, requires_grad=True))
        assert activations.held == 400
    output.sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpoint_is_torch_s_bit_for_bit(dropout: float) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)
    ).double()
    ours, theirs = copy.deepcopy(block), copy.deepcopy(block)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    found = []
    by_torch = partial(checkpoint, use_reentrant=True)
    for module, run in ((block, nn.Module.__call__), (ours, Checkpoint.apply), (theirs, by_torch)):
        given = x.clone().requires_grad_()
        torch.manual_seed(7)
        output = run(module, given)
        state = torch.get_rng_state()
        output.square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state), "backward draws for nobody else"
        found.append([output, given.grad, *(param.grad for param in module.parameters())])
    for one, other, third in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_a_checkpoint_keeps_its_input_and_has_one_block_at_the_peak() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(4)]
    tensor = 4 * 3 * 8
    x = torch.ones(3, 8, requires_grad=True)
    with Activations(nn.Sequential(*blocks)) as activations:
        for block in blocks:
            x = Checkpoint.apply(block, x)
        assert activations.held == 4 * tensor
        x.sum().backward()
    assert activations.peak == 5 * tensor  # the last block's output besides


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpt_keeps_what_the_formula_says(dtype: torch.dtype, recompute: bool) -> None:
    """Besides the blocks' activations: those of the head and the loss, the statistics of norms and
    attention, and token ids."""
    layers, width, sizes = 2, 48, GPTConfig()
    embed, *blocks, head = new_gpt(GPTConfig(layers=layers, width=width), 1).to(dtype)
    [(tokens, targets)] = batches(1, 1, 1234)
    with Activations(nn.Sequential(embed, *blocks, head)) as activations:
        hidden = embed(tokens)
        for block in blocks:
            hidden = Checkpoint.apply(block, hidden) if recompute else block(hidden)
        loss = copying_loss(head(hidden).float(), targets)
        held = activations.held
    loss.backward()
    kept = formulas.kept_bytes(sizes.length, width, layers, dtype.itemsize, recompute=recompute)
    of_head = dtype.itemsize * (2 * width + 2) + 4 * sizes.vocabulary
    statistics = 0 if recompute else layers * (4 * dtype.itemsize + 4 * sizes.heads)
    assert held == pytest.approx(kept + sizes.length * (of_head + statistics + 3 * 8), rel=0.001)


@pytest.mark.parametrize("ranks", [1, 64])
def test_each_stage_of_zero_shards_one_more_kind_of_sixteen_bytes(ranks: int) -> None:
    shares = [formulas.state_bytes(formulas.MIXED, stage, ranks) for stage in formulas.STAGES]
    assert shares == [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
