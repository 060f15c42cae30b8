"""The tiny GPT: it learns to copy, only by attention, and its units do not depend on each other."""

from __future__ import annotations

import math

import pytest
import torch

from playground.training import gpt
from playground.training.gpt_config import GPTConfig


def losses(model: torch.nn.Sequential, seed: int, steps: int) -> list[float]:
    optimizer, generator, found = torch.optim.AdamW(model.parameters()), torch.Generator().manual_seed(seed), []
    for step in range(steps):
        gpt.set_lr(optimizer, step)
        tokens, targets = gpt.copying(24, generator)
        loss = gpt.copying_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_copies_by_attention_alone() -> None:
    model, deaf = gpt.new_model(GPTConfig(), 1234), gpt.new_model(GPTConfig(), 1234)
    assert sum(param.numel() for param in model.parameters()) == 237_120
    for block in deaf[1:-1]:
        block.attention.attend = lambda query, key, value: value
    learnt, chance = losses(model, 1234, 70), losses(deaf, 1234, 50)
    assert learnt[0] == pytest.approx(4.0, abs=0.1)
    assert learnt[-1] < 0.1
    assert learnt[49] < chance[-1] - 1
    assert chance[-1] == pytest.approx(math.log(gpt.NUMBERS), abs=0.1)


def test_a_unit_is_the_same_alone_and_in_any_model() -> None:
    whole, deeper = gpt.new_model(GPTConfig(), 1234), gpt.new_model(GPTConfig(layers=3), 1234)
    for number, unit in enumerate(whole):
        alone = gpt.new_unit(GPTConfig(), 1234, number)
        assert all(map(torch.equal, unit.parameters(), alone.parameters()))
    assert all(map(torch.equal, whole[1].parameters(), deeper[1].parameters()))
    assert not torch.equal(whole[1].up.weight, whole[2].up.weight)
    assert whole[1].attention.output.bias.std() > 0


def test_positions_and_attention_can_be_replaced() -> None:
    """A rank with the second half of a sequence embeds it as the whole model does."""
    embed = gpt.new_unit(GPTConfig(), 1234, 0)
    tokens, _ = gpt.copying(2, torch.Generator().manual_seed(0))
    whole = embed(tokens)
    embed.place = lambda ids: torch.arange(24, 48)
    assert torch.equal(embed(tokens[:, 24:]), whole[:, 24:])
