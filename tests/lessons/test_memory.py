"""The lesson memory: bytes counted against closed forms, precision against float32, activations
computed again against torch's checkpoint."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from fixtures import Worlds
from torch import nn
from torch.utils.checkpoint import checkpoint

from playground.lessons.memory import further, lesson
from playground.lessons.memory.lesson import Activations, Block, Checkpoint
from playground.training import formulas


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_parameter_has_sixteen_bytes_and_activations_those_of_the_formula(
    size: int, world: Worlds
) -> None:
    for values in world(size).run(lesson.account):
        numel = sum(param.numel() for param in lesson.new_model().parameters())
        assert values["parameters"] == values["gradients"] == 4 * numel
        assert values["optimizer"] == 8 * numel
        assert values["per_parameter"] == formulas.state_bytes(formulas.FLOAT32) == 16
        blocks = formulas.kept_bytes(8 * lesson.LENGTH, lesson.WIDTH, lesson.BLOCKS, 4)
        head = 4 * 8 * lesson.LENGTH * (lesson.WIDTH + lesson.VOCABULARY)
        assert values["by_formula"] == blocks + head
        assert values["activations"] == pytest.approx(values["by_formula"], rel=0.05)


@pytest.mark.parametrize("ranks", [1, 64])
def test_each_stage_of_zero_shards_one_more_kind_of_sixteen_bytes(ranks: int) -> None:
    shares = [formulas.state_bytes(formulas.MIXED, stage, ranks) for stage in formulas.STAGES]
    assert shares == [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]


def mixed_precision_in_one_block(rank: int, size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "BLOCKS", 1)
        return further.mixed_precision(rank, size)


def test_bfloat16_alone_stalls_and_float32_masters_train_as_float32_does(world: Worlds) -> None:
    for values in world(2).run(mixed_precision_in_one_block):
        methods = values["methods"]
        loss = {method: row["loss"] for method, row in methods.items()}
        assert loss["masters"] == pytest.approx(loss["float32"], rel=0.02)
        assert loss["autocast"] == pytest.approx(loss["float32"], rel=0.02)
        assert loss["bfloat16"] > 1.25 * loss["float32"]
        assert methods["bfloat16"]["moved"] < 0.8 < methods["masters"]["moved"]
        assert {method: row["bytes"] for method, row in methods.items()} == {
            "float32": 16, "bfloat16": 8, "masters": 16, "autocast": 16
        }  # fmt: skip


def test_more_ranks_round_a_sum_in_bfloat16_more_often(world: Worlds) -> None:
    errors = {size: world(size).run(further.summed)[0] for size in (1, 2, 4, 8)}
    assert errors[1]["bfloat16"] == 0
    assert 1e-3 < errors[2]["bfloat16"] < errors[4]["bfloat16"] < errors[8]["bfloat16"] < 1e-2
    assert all(each["float32"] < 1e-6 for each in errors.values())


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints_keep_the_inputs_of_blocks_and_one_block_at_the_peak(
    size: int, world: Worlds
) -> None:
    for values, others in zip(
        world(size).run(lesson.checkpointing), world(size).run(further.beside_torch), strict=True
    ):
        ways = values["ways"]
        by_torch, selective = (others["ways"].pop(way) for way in ("by_torch", "selective"))
        assert others["ways"] == ways
        assert by_torch == {**ways["by_hand"], "at_most": None}
        assert ways["by_hand"]["equal_bits"]
        kept = {way: row["kept"] for way, row in ways.items()}
        peak = {way: row["at_most"] for way, row in ways.items()}
        shape = 8 * lesson.LENGTH, lesson.WIDTH, lesson.BLOCKS
        inputs = formulas.kept_bytes(*shape, 4, recompute=True) // 1024
        assert inputs < kept["by_hand"] < 2 * inputs
        block = (kept["all"] - kept["by_hand"]) / lesson.BLOCKS
        assert peak["by_hand"] == pytest.approx(kept["by_hand"] + block, rel=0.25)
        assert peak["all"] == kept["all"]
        assert 1.3 <= ways["by_hand"]["work"] <= 1.34  # a third more, but for the head
        assert selective["equal_bits"]
        again = 10 * formulas.kept_bytes(*shape, 4, recompute=True) // 1024
        assert selective["kept"] == pytest.approx(kept["all"] - again, rel=0.02)
        two_layers = (ways["by_hand"]["work"] - 1) * 8 / 12  # of the four's weights
        assert 1 + two_layers - 0.04 < selective["work"] < ways["by_hand"]["work"]


def test_the_fewest_tensors_are_kept_with_about_the_root_of_the_layers(world: Worlds) -> None:
    for values in world(2).run(further.every_few_layers):
        rows = values["segments"]
        assert all(row["at_most"] == row["by_formula"] for row in rows.values())
        assert {name: row["work"] for name, row in rows.items() if name != "all"} == {
            f"k = {k}": 1.33 for k in (1, 2, 4, 8, 16, 32)
        }
        assert min(rows, key=lambda name: rows[name]["at_most"]) == "k = 4"
        assert rows["k = 4"]["kept"] * 8 == rows["all"]["kept"]


def test_microbatches_keep_a_part_of_the_activations(world: Worlds) -> None:
    for values in world(2).run(further.accumulation):
        whole, parts = values["kept"].values()
        assert 4 * parts == pytest.approx(whole, rel=0.05)
        assert values["difference"] < 1e-7


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpoint_by_hand_is_torch_s_bit_for_bit(dropout: float) -> None:
    torch.manual_seed(0)
    block = Block(dropout).double()
    ours, theirs = copy.deepcopy(block), copy.deepcopy(block)
    x = torch.randn(2, 5, lesson.WIDTH, dtype=torch.float64)
    found = []
    by_torch = partial(checkpoint, use_reentrant=True)
    for module, run in ((block, lesson.run_block), (ours, Checkpoint.apply), (theirs, by_torch)):
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
