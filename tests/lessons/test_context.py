"""context: attention over a sequence that is cut is one process's, forward and backward, in equal
parts, and sends what the chapter says."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Run, Worlds
from one_process import EXACT
from ranks import misbehave
from torch import Tensor

from playground.base.remote import file_of
from playground.lessons import LESSONS
from playground.lessons.gpt import GPT, LAYERS, C, H, T, make_batch
from playground.world import RankFailed, device

FOLDER = file_of(LESSONS["context"].module).parent


def lesson() -> Any:
    """Imported where it is needed: what context_parallel imports takes seconds."""
    from playground.lessons.context import lesson

    return lesson


def new_heads(tensors: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = tensors, 2, H, T, 4
    return [*torch.randn(shape, generator=generator, dtype=torch.float64).to(device())]


def attend_by_all(rank: int, size: int) -> dict[str, tuple[float, list[int]]]:
    """By way: the largest difference of the output and the three gradients from one process, and
    the pairs that this rank has computed in each hop."""
    from playground.lessons.context.ulysses import ulysses

    context = lesson()
    torch.set_default_device(device())
    rings = {
        "contiguous": (torch.arange(T).chunk(size)[rank], context.contiguous_visible),
        "zigzag": (context.zigzag_positions(rank, size), context.zigzag_visible),
    }
    ways: dict[str, tuple[Tensor, Any]] = {
        name: (mine, lambda *qkv, visible=visible: context.RingAttention.apply(*qkv, visible))
        for name, (mine, visible) in rings.items()
    }
    ways["ulysses"] = rings["contiguous"][0], ulysses
    found = {}
    for name, (mine, attention) in ways.items():
        *whole, dout = new_heads(4)
        own = [each[:, :, mine].requires_grad_() for each in whole]
        q, k, v = (each.requires_grad_() for each in whole)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        expected.backward(dout)
        context.pairs.clear()
        output = attention(*own)
        counted = [*context.pairs]
        output.backward(dout[:, :, mine])
        gradients = zip(own, (q, k, v), strict=True)
        pairs = [(output, expected), *((one.grad, each.grad) for one, each in gradients)]
        off = max((one - each[:, :, mine]).abs().max().item() for one, each in pairs)
        found[name] = off, counted
    torch.set_default_device(None)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_is_one_process_s_forward_and_backward(size: int, world: Worlds) -> None:
    by_rank = world(size, timeout=300).run(attend_by_all)
    assert [off for found in by_rank for off, _ in found.values() if not off <= EXACT] == []
    part = T // size
    own = part * (part + 1) // 2
    for rank, found in enumerate(by_rank):
        sources = [(rank - hop) % size for hop in range(1, size)]
        assert found["contiguous"][1] == [own, *(part**2 * (each < rank) for each in sources)]
        assert found["zigzag"][1] == [own, *(part**2 // 2 for _ in sources)]
    work = [sum(found["contiguous"][1]) for found in by_rank]
    assert max(work) * size / sum(work) == pytest.approx(
        2 - 1 / size, abs=0.1
    )  # own blocks are half


def gradients_by_all(rank: int, size: int) -> dict[str, float]:
    """By method: how far the gradients of the GPT are from one process's."""
    from playground.lessons.context import ulysses
    from playground.lessons.gpt import next_token_loss

    context, found = lesson(), {}
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(device())
    try:
        batch = make_batch(context.SEQUENCES, seed=5)
        torch.manual_seed(1234)
        gpt = GPT()
        next_token_loss(gpt, batch).backward()
        expected = torch.cat([param.grad.flatten() for param in gpt.parameters()])
        for method in (context.contiguous, context.zigzag, context.library):
            gradients, positions = method(batch, rank, size)
            assert len(positions) == T // size
            found[method.__name__] = (gradients - expected).abs().max().item()
        mine = torch.arange(T).chunk(size)[rank]
        gradients = ulysses.compute_gradients(ulysses.ulysses, batch, mine)
        found["ulysses"] = (gradients - expected).abs().max().item()
        return found
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(size: int, world: Worlds) -> None:
    for found in world(size, timeout=300).run(gradients_by_all):
        assert [*found] == ["contiguous", "zigzag", "library", "ulysses"]
        assert max(found.values()) <= EXACT


def sent_by_function(file: Path) -> dict[str, float]:
    """By function of the program; what PyTorch sends in C++ is under "native"."""
    sent: defaultdict[str, float] = defaultdict(float)
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        sent["native" if row["operation"].endswith(" in C++") else row["function"]] += row["sent"]
    return sent


@pytest.mark.parametrize("size", [2, 3])
def test_the_profile_has_the_bytes_of_the_formulas(size: int, run_cli: Run, tmp_path: Path) -> None:
    """Of all ranks, in float64, for each of the layers."""
    whole = 8.0 * lesson().SEQUENCES * T * C
    chapter = (FOLDER / "README.md").read_text(encoding="utf-8")
    ran = run_cli("context", "-n", size, "--profile", tmp_path / "ring.json")
    assert ran.code == 0, ran.err
    assert "(6N - 4) / N · A bytes" in chapter
    two_rings = 2 * LAYERS * (6 * size - 4) * whole
    assert sent_by_function(tmp_path / "ring.json")["pass_on"] == pytest.approx(two_rings)
    words = ("--profile", tmp_path / "ulysses.json", FOLDER / "ulysses.py")
    ran = run_cli("run", "-n", size, *words)
    assert ran.code == 0, ran.err
    assert "8 (N - 1) / N² · A bytes" in chapter
    sent = sent_by_function(tmp_path / "ulysses.json")["forward"]
    assert sent == pytest.approx(LAYERS * 8 * (size - 1) / size * whole)


@pytest.mark.torch(2, 14)  # older ones do not tell of calls in C++
def test_the_library_sends_the_bytes_of_gathered_keys(run_cli: Run, tmp_path: Path) -> None:
    ran = run_cli("context", "-n", 3, "--profile", tmp_path / "ring.json")
    assert ran.code == 0, ran.err
    assert "(6N - 6) / N · A bytes" in (FOLDER / "README.md").read_text(encoding="utf-8")
    whole = 8.0 * lesson().SEQUENCES * T * C
    sent = sent_by_function(tmp_path / "ring.json")["native"]
    assert sent == pytest.approx(LAYERS * (6 * 3 - 6) * whole)


def broken(line: str, replacement: str, folder: Path) -> Path:
    """The program with another line."""
    text = (FOLDER / "lesson.py").read_text(encoding="utf-8")
    assert text.count(line) == 1
    file = folder / "lesson.py"
    file.write_text(text.replace(line, replacement), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("line", "replacement", "wrong"),
    [
        (" - delta)", ")", ("contiguous", "zigzag")),
        ("pass_on(block[2:])", "block[2:]", ("contiguous", "zigzag")),
        (
            "keys = torch.cat([zigzag_positions(source, size) for source in range(size)])",
            "keys = torch.arange(T)",
            ("library",),
        ),
    ],
)
def test_what_there_is_to_try_is_wrong_by_what_the_chapter_says(
    line: str, replacement: str, wrong: tuple[str, ...], run_cli: Run, tmp_path: Path
) -> None:
    ran = run_cli("run", "-n", 3, broken(line, replacement, tmp_path))
    assert ran.code == 1, ran.err
    assert f"not the gradients of one process: {', '.join(wrong)} (" in ran.err
    found = dict(re.findall(r"^Rank 0, (\w+): .* difference (\S+)$", ran.out, re.MULTILINE))
    assert len(found) == 3
    chapter = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, difference in found.items():
        assert (float(difference) > EXACT) == (name in wrong), name
        assert name not in wrong or difference in chapter


@pytest.mark.parametrize("size", [5, 8])
def test_chunks_that_cannot_be_equal_are_refused_in_one_line(size: int, run_cli: Run) -> None:
    ran = run_cli("context", "-n", size)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "2N chunks must be equal: choose a number that divides 12" in ran.err


def test_heads_that_cannot_be_divided_are_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("run", "-n", 5, FOLDER / "ulysses.py")
    assert (ran.code, ran.out) == (1, "")
    assert "heads are divided equally: choose a number that divides 12" in ran.err


def test_the_program_of_ulysses_prints_what_the_chapter_shows(run_cli: Run) -> None:
    ran = run_cli("run", "-n", 4, FOLDER / "ulysses.py")
    assert (ran.code, ran.err) == (0, "")
    [difference] = re.findall(r"^ulysses: largest difference (\S+)$", ran.out, re.MULTILINE)
    assert float(difference) <= EXACT


def die_in_backward(rank: int, size: int) -> None:
    context = lesson()
    q = torch.zeros(1, 1, T // size, 2, requires_grad=True)
    output = context.RingAttention.apply(q, q, q, context.zigzag_visible)
    if rank == 1:
        output.register_hook(lambda gradient: misbehave("kill"))
    output.sum().backward()


def test_a_rank_that_is_killed_in_backward_is_named(world: Worlds) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL"):
        world(2).run(die_in_backward)
