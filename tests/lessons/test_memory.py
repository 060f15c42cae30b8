"""memory: the bytes of a step are those of the formulas, blocks that compute again have the same
gradients, and float32 masters lose no update."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fixtures import Run, Worlds
from one_process import EXACT
from torch import nn
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, LAYERS, Block, C, H, T, V, make_batch, next_token_loss
from playground.lessons.memory import lesson
from playground.training import formulas

memory: Any = lesson
SEQUENCES = 12
TOKENS = SEQUENCES * T
NUMEL = sum(param.numel() for param in GPT().parameters())
STATE = formulas.FLOAT32
OF_TOKEN = 4 * (16 * C + H + 4)
BLOCK = OF_TOKEN * TOKENS
"""Bytes that a block keeps: the numbers of gpt's formula, in float32."""
INPUT = 4 * C * TOKENS
INTEGERS = 8 * (SEQUENCES * (T + 1) + T)
"""Bytes of the tokens and places that the embeddings keep."""
HEAD = 4 * (C + 2 + C + V) * TOKENS + 8 * TOKENS + 4
"""Bytes of the last norm, the linear layer, and the loss: its logarithms, labels, and weight."""
Moments = list[tuple[str, list[int]]]
BLOCKS = (Block, memory.RecomputedBlock, memory.CheckpointedBlock)


@contextmanager
def collecting(found: Moments) -> Iterator[None]:
    """Collect the moments that are drawn, and the bytes held then, instead of printing them."""
    counted: list[list[int]] = []
    count = memory.bytes_held

    def keep(*arguments: object) -> list[int]:
        counted.append(count(*arguments))
        return counted[-1]

    def note(text: str) -> None:
        if "KiB" in text:
            found.append((text.split()[0], counted[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "bytes_held", keep)
        patch.setattr(lesson, "say", note)
        yield


def draw_steps(rank: int, size: int) -> list[Moments]:
    """A step with each kind of block, and whether anything is kept after it."""
    steps = []
    for block in BLOCKS:
        found: Moments = []
        with collecting(found):
            memory.draw_step(block, make_batch(SEQUENCES, seed=0))
        steps.append(found)
    assert not memory.kept
    return steps


@pytest.fixture
def steps(world: Worlds) -> list[Moments]:
    [found] = world(1).run(draw_steps)
    return list(found)


def test_a_step_holds_sixteen_bytes_for_each_parameter_and_what_blocks_keep(
    steps: list[Moments],
) -> None:
    parameters, gradients, optimizer = (each * NUMEL for each in STATE)
    whole, recomputed, _ = steps
    assert [moment for moment, _ in whole] == ["forward"] * 2 + ["backward"] * 2 + ["step"]
    for block, (_, held) in enumerate(whole[:2], 1):
        assert held == [parameters, 0, optimizer, INTEGERS + block * BLOCK]
    for moments in steps:
        assert moments[-1] == ("step", [parameters, gradients, optimizer, 0])
    behind = whole[2][1]
    of_block = 4 * (12 * C**2 + 13 * C)
    assert behind[1] == of_block + 4 * (2 * C + C * V + V)
    assert INTEGERS + BLOCK <= behind[3] <= INTEGERS + BLOCK + INPUT  # norm1 may not be done yet
    assert sum(behind) < sum(whole[1][1])
    assert len(recomputed) == len(whole) + LAYERS


def test_a_block_that_computes_again_keeps_its_input_and_one_block_has_activations(
    steps: list[Moments],
) -> None:
    _, recomputed, by_torch = steps
    moments = [moment for moment, _ in recomputed]
    assert moments == ["forward"] * 2 + ["forward", "backward"] * 2 + ["step"]
    kept = [held[3] for _, held in recomputed]
    assert kept[:2] == [INTEGERS, INTEGERS + INPUT]
    # of the second block its input is there already
    assert kept[2] == INTEGERS + INPUT + BLOCK
    assert kept[4] == INTEGERS + BLOCK
    assert [held[3] for _, held in by_torch][:2] == [INTEGERS + INPUT, INTEGERS + 2 * INPUT]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_any_optimizer_s_state_is_counted(momentum: float) -> None:
    """A state of other names than Adam's, or none."""
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    next_token_loss(model, make_batch(1, seed=0)).backward()
    optimizer.step()
    held = memory.bytes_held(model, optimizer)
    assert held == [4 * NUMEL, 4 * NUMEL, 4 * NUMEL * bool(momentum), 0]


def test_activations_are_as_many_bytes_as_the_rest_with_three_tokens_for_each_channel(
    steps: list[Moments],
) -> None:
    """Of the blocks, without biases, norms and statistics: within 2 %."""
    assert TOKENS == 3 * C
    state = sum(STATE) * 12 * C**2 * LAYERS
    assert steps[0][1][1][3] == pytest.approx(state, rel=0.02)
    assert formulas.kept_bytes(TOKENS, C, LAYERS, 4) == state


def gradients(rank: int, size: int) -> list[tuple[float, bool]]:
    """Of each kind of block: the largest difference of averaged gradients from one process, and
    whether those of this rank have the bits of a block that keeps everything."""
    batch = make_batch(12, seed=0)
    part = batch.chunk(size)[rank]
    expected = memory.compute_gradients(Block, batch)
    bits = memory.compute_gradients(Block, part)
    found = []
    for block in BLOCKS:
        grads = memory.compute_gradients(block, part)
        equal = all(map(torch.equal, grads, bits))
        memory.average(grads)
        difference = parameters_to_vector(grads) - parameters_to_vector(expected)
        found.append((difference.abs().max().item(), equal))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_blocks_that_compute_again_have_the_gradients_of_one_process(
    size: int, world: Worlds
) -> None:
    for found in world(size).run(gradients):
        for difference, equal in found:
            assert equal
            assert difference <= EXACT


def trained_with_masters(rank: int, size: int) -> tuple[bool, float]:
    """Whether parameters that are rounded in forward are the masters of a model in bfloat16, which
    an optimizer steps for and copies, bit for bit; and how far they have moved."""
    batch = make_batch(size, seed=0).chunk(size)[rank]
    model = memory.make_model(Block)
    start = parameters_to_vector(model.parameters())
    memory.train(model, memory.master_loss, batch)

    rounded: Any = memory.make_model(Block)
    masters = [nn.Parameter(param.detach().clone()) for param in rounded.parameters()]
    rounded.bfloat16()
    optimizer = torch.optim.Adam(masters, memory.LR)
    for _ in range(memory.STEPS):
        rounded.zero_grad()
        next_token_loss(lambda tokens: rounded(tokens).float(), batch).backward()
        for master, param in zip(masters, rounded.parameters(), strict=True):
            master.grad = param.grad.float()
        memory.average([master.grad for master in masters])
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, rounded.parameters(), strict=True):
                param.copy_(master)
    found = parameters_to_vector(model.parameters())
    return torch.equal(found, parameters_to_vector(masters)), (found - start).abs().max().item()


def test_masters_are_what_a_model_in_bfloat16_would_have(world: Worlds) -> None:
    for equal, moved in world(2).run(trained_with_masters):
        assert equal
        assert moved > memory.LR


@pytest.mark.parametrize("size", [1, 2])
def test_bfloat16_loses_updates_and_masters_and_autocast_train_as_float32_does(
    size: int, run_cli: Run
) -> None:
    ran = run_cli("memory", "-n", size)
    assert (ran.code, ran.err) == (0, "")
    *_, header, float32, bfloat16, masters, autocast = ran.out.splitlines()
    assert "changed parameters" in header
    rows = [
        [float(number.rstrip("%")) for number in row.split()[-4:]]
        for row in (float32, bfloat16, masters, autocast)
    ]
    assert [bytes_held for _, _, bytes_held, _ in rows] == [16, 8, 16, 16]
    losses = [loss for loss, *_ in rows]
    assert losses[2:] == [pytest.approx(losses[0], rel=0.02)] * 2
    assert losses[1] > 1.08 * losses[0]
    assert rows[1][1] < 60 < 95 < min(rows[0][1], rows[2][1], rows[3][1])
    tokens = memory.SEQUENCES * T // size
    of_blocks = [each * OF_TOKEN * tokens * LAYERS / 1024 for each in (1, 1 / 2)]
    in_float32, in_bfloat16, with_copies, by_autocast = (kept for *_, kept in rows)
    assert [in_float32, in_bfloat16] == [pytest.approx(each, rel=0.1) for each in of_blocks]
    assert with_copies - in_bfloat16 == pytest.approx(2 * NUMEL / 1024, rel=0.15)
    residuals = 2 * 2 * C * tokens * LAYERS / 1024  # inputs of norms are not bfloat16
    assert by_autocast - with_copies == pytest.approx(residuals, rel=0.4)


def letters(printed: str) -> list[str]:
    return re.findall(r"KiB ([PGOA]+)$", printed, re.MULTILINE)


def test_more_ranks_divide_activations_and_nothing_else(run_cli: Run) -> None:
    pictures = {
        size: letters(run_cli("memory", "-n", size, "--steps", 1).out) for size in (1, 2, 4)
    }
    for size, lines in pictures.items():
        assert [line.replace("A", "") for line in lines] == [
            line.replace("A", "") for line in pictures[1]
        ]
        kept = lines[1].count("A") * 2**17
        tokens = memory.SEQUENCES * T // size
        assert kept == pytest.approx(OF_TOKEN * tokens * LAYERS, abs=2**17)


def test_ranks_that_cannot_divide_the_batch_are_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("memory", "-n", 5)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "5 ranks cannot divide a batch of 24 equally" in ran.err
