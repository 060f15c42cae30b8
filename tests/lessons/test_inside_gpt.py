"""gpt: what a model has, keeps and computes is what the formulas say, for any sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Run, Worlds
from torch import Tensor, nn

from playground.lessons import gpt
from playground.lessons.inside_gpt import lesson
from playground.training import formulas

SIZES = [
    {},
    {"C": 48, "H": 4, "T": 12, "V": 24, "LAYERS": 3},
    {"C": 24, "H": 3, "T": 48, "V": 96, "LAYERS": 1},
]
"""Constants of the given model."""


@pytest.fixture(params=SIZES, ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in request.param.items():
        monkeypatch.setattr(gpt, name, value)
        monkeypatch.setattr(lesson, name, value)


def model_with(block: Callable[[], nn.Module]) -> gpt.GPT:
    model = gpt.GPT()
    model.blocks = nn.ModuleList(block() for _ in range(gpt.LAYERS))
    return model


@pytest.mark.parametrize("block", [gpt.Block, lesson.LibraryBlock])
@pytest.mark.usefixtures("sizes")
def test_a_step_of_one_process_is_what_the_formulas_say(block: Callable[[], nn.Module]) -> None:
    counted = lesson.count_step(model_with(block), gpt.make_batch(lesson.SEQUENCES, 0))
    assert counted.tolist() == lesson.step_by_formula(1).tolist()


def test_a_step_of_a_model_of_another_name_is_counted() -> None:
    other: Any = type("Net", (gpt.GPT,), {})
    counted = lesson.count_step(other(), gpt.make_batch(lesson.SEQUENCES, 0))
    assert counted.tolist() == lesson.step_by_formula(1).tolist()


@pytest.mark.usefixtures("sizes")
def test_the_table_of_a_block_adds_up_to_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    lesson.print_block(gpt.GPT(), gpt.make_batch(4, 0))
    header, *rows, total, formula, rule = capsys.readouterr().out.splitlines()
    assert header.split() == ["first", "block", "output", "parameters", "kept", "operations"]
    assert [row.split()[0].removeprefix("blocks.0") for row in rows] == [
        "", ".norm1", ".attention", ".attention.qkv", ".attention.out", ".norm2", ".mlp",
        ".mlp.up", ".mlp.down",
    ]  # fmt: skip
    assert total.split()[-3:] == formula.split()[-3:]
    numbers = [int(number.replace(",", "")) for number in rule.split()[-3:]]
    assert numbers[1] == formulas.KEPT_WIDTHS * gpt.C
    assert numbers[2] == 6 * numbers[0] == 72 * gpt.C**2
    shapes = {row.split()[0]: row[row.index("[") : row.index("]") + 1] for row in rows}
    assert shapes["blocks.0.attention.qkv"] == str([4, gpt.T, 3 * gpt.C])
    assert shapes["blocks.0.mlp.up"] == str([4, gpt.T, 4 * gpt.C])


def test_the_rules_are_near_the_formulas_where_the_model_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 blocks of 4,096 channels: the chapter's problem. Attention adds T / 6 C operations."""
    for name, value in {"C": 4096, "H": 32, "T": 4096, "V": 32_000, "LAYERS": 32}.items():
        monkeypatch.setattr(lesson, name, value)
    shares = lesson.step_by_rule(64) / lesson.step_by_formula(64)
    assert shares[0] == pytest.approx(1 / 1.04, abs=0.005)
    assert shares[1] == pytest.approx(1, abs=0.001)
    assert shares[2] == pytest.approx(1 / (1 + 1 / 6 + 0.02), abs=0.01)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_divide_activations_and_operations_and_copy_parameters(
    size: int, run_cli: Run
) -> None:
    ran = run_cli("gpt", "-n", size)
    assert (ran.code, ran.err) == (0, "")
    _, table = ran.out.split("\n\n")
    rows = {
        words[0]: [int(word.replace(",", "")) for word in words[1:]]
        for words in (line.split() for line in table.splitlines()[1:4])
    }
    for name, (rank_0, total, formula, _) in rows.items():
        assert total == size * rank_0 == formula, name
    assert rows["parameters"][0] == 235_440
    assert table.count("blocks 0\n") == 2


def test_ranks_that_cannot_divide_the_batch_are_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("gpt", "-n", 5)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "5 ranks cannot divide a batch of 36 equally" in ran.err


def averages(rank: int, size: int) -> list[float]:
    """The largest change of an output of earlier tokens, when the last token changes."""
    found = []
    for block in (gpt.Block, lesson.LibraryBlock):
        torch.manual_seed(rank)
        layer: Any = block()
        x = torch.randn(2, gpt.T, gpt.C)
        changed = x.clone()
        changed[:, -1] += 1
        with torch.no_grad():
            difference = (layer(x) - layer(changed)).abs()
        assert difference[:, -1].max() > 0.1
        found.append(difference[:, :-1].max().item())
    return found


def test_no_token_sees_a_later_one(world: Worlds) -> None:
    assert world(1).run(averages) == [[0.0, 0.0]]


def test_torch_s_block_computes_what_ours_does() -> None:
    """With the same parameters: torch has those of all queries first, ours go head by head."""
    torch.manual_seed(0)
    ours: Any = gpt.Block().double()
    theirs: Any = lesson.LibraryBlock().double()

    def by_kind(param: Tensor) -> Tensor:
        return param.unflatten(0, (gpt.H, 3, gpt.C // gpt.H)).transpose(0, 1).flatten(0, 2)

    pairs = [
        (theirs.self_attn.in_proj_weight, by_kind(ours.attention.qkv.weight)),
        (theirs.self_attn.in_proj_bias, by_kind(ours.attention.qkv.bias)),
    ]
    for their, our in (
        (theirs.self_attn.out_proj, ours.attention.out),
        (theirs.norm1, ours.norm1), (theirs.norm2, ours.norm2),
        (theirs.linear1, ours.mlp.up), (theirs.linear2, ours.mlp.down),
    ):  # fmt: skip
        pairs += zip(their.parameters(), our.parameters(), strict=True)
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)
    x = torch.randn(3, gpt.T, gpt.C, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(gpt.T, dtype=torch.float64)
    expected = nn.TransformerEncoderLayer.forward(theirs, x, src_mask=mask, is_causal=True)
    assert F.l1_loss(ours(x), expected) < 1e-14
