"""The tiny GPT: it learns to copy, only by attention, and its units do not depend on each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import one_process
import pytest
import torch

from playground.testing import World
from playground.training import tiny_gpt
from playground.training.tiny_gpt import GPTConfig, new_gpt


def losses(model: torch.nn.Sequential, seed: int, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        tiny_gpt.set_lr(optimizer, step)
        tokens, targets = tiny_gpt.copying(24, generator)
        loss = tiny_gpt.copying_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_copies_by_attention_alone() -> None:
    model, deaf = new_gpt(GPTConfig(), 1234), new_gpt(GPTConfig(), 1234)
    assert sum(param.numel() for param in model.parameters()) == 237_120
    for block in deaf[1:-1]:
        block.attention.attend = lambda query, key, value: value
    learnt, chance = losses(model, 1234, 64), losses(deaf, 1234, 20)
    assert learnt[0] == pytest.approx(4.0, abs=0.1)
    assert learnt[-1] < 0.1
    assert learnt[49] < chance[-1] - 1
    assert chance[-1] == pytest.approx(math.log(tiny_gpt.NUMBERS), abs=0.1)


def test_a_unit_is_the_same_alone_and_in_any_model() -> None:
    whole, deeper = new_gpt(GPTConfig(), 1234), new_gpt(GPTConfig(layers=3), 1234)
    for number, unit in enumerate(whole):
        alone = tiny_gpt.new_unit(GPTConfig(), 1234, number)
        assert all(map(torch.equal, unit.parameters(), alone.parameters()))
    assert all(map(torch.equal, whole[1].parameters(), deeper[1].parameters()))
    assert not torch.equal(whole[1].up.weight, whole[2].up.weight)
    assert whole[1].attention.output.bias.std() > 0


def new_task(off: dict[int, float]) -> tuple[torch.nn.Linear, one_process.Backward]:
    """A model, and what computes its gradients; the losses of some steps are told `off`. No
    gradient is of before."""
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(3, 1, dtype=torch.float64), list[float]()

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert all(param.grad is None or not param.grad.any() for param in model.parameters())
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        seen.append(loss.item())
        return seen[-1] + off.get(len(seen), 0.0)

    return model, backward


def compare_with_what_is_off(rank: int, size: int) -> None:
    given = [
        (torch.full((2, 3), step + 1.0).double(), torch.ones(2, 1).double()) for step in range(3)
    ]
    same = one_process.compare(new_task({}), new_task({}), given)
    assert (same.loss_difference, same.parameter_difference) == (0.0, 0.0)
    off = one_process.compare(new_task({2: 0.5}), new_task({}), given)
    assert off.loss_difference == pytest.approx(0.5)
    lost = one_process.compare(new_task({2: math.nan}), new_task({}), given)
    assert lost.loss_difference == math.inf
    model, whole = new_task({})[0], new_task({})[0]
    with torch.no_grad():
        model.bias += 0.25
    assert one_process.parameter_difference(whole, model) == pytest.approx(0.25)
    with torch.no_grad():
        model.bias += math.nan
    assert one_process.parameter_difference(whole, model) == math.inf


def test_a_comparison_finds_what_differs_in_one_step_or_one_parameter(
    world: Callable[..., World],
) -> None:
    world(1).run(compare_with_what_is_off)
