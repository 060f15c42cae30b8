"""A model in stages: one process's gradients by every schedule, as little idle time and memory as
promised."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Run, Worlds
from hypothesis import given, strategies as st
from one_process import EXACT
from ranks import misbehave

from playground.base.remote import file_of
from playground.lessons import LESSONS
from playground.lessons.gpt import C, T, make_batch
from playground.world import RankFailed, device

OURS = ("naive", "gpipe", "one_forward_one_backward")
SOURCE = file_of(LESSONS["pipeline"].module)


def lesson() -> Any:
    """Imported where it is needed: what torch.distributed.pipelining imports takes seconds."""
    from playground.lessons.pipeline import lesson

    return lesson


def idle_and_held(name: str, stages: int, microbatches: int) -> tuple[float, list[int]]:
    """The chapter's table."""
    if name == "naive":
        return (stages - 1) / stages, [1] * stages
    idle = (stages - 1) / (microbatches + stages - 1)
    if name == "gpipe":
        return idle, [microbatches] * stages
    return idle, [min(microbatches, stages - stage) for stage in range(stages)]


def most_held(order: list[str]) -> int:
    return max(2 * order[: k + 1].count("forward") - (k + 1) for k in range(len(order)))


def work_by_all(rank: int, size: int, counts: list[int]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """By schedule and number of microbatches: how far this stage's gradients are from one process,
    its order, and how much it still holds."""
    pipeline, found = lesson(), {}
    pipeline.BLOCKS, pipeline.SEQUENCES = 4, 1
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(device())
    try:
        groups = {name: torch.distributed.new_group() for name in ("forward", "backward")}
        part = slice(pipeline.BLOCKS * rank // size, pipeline.BLOCKS * (rank + 1) // size)
        for pipeline.MICROBATCHES in counts:
            batch = make_batch(pipeline.MICROBATCHES * pipeline.SEQUENCES, seed=3)
            model = pipeline.make_model()
            pipeline.token_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
            expected = pipeline.gradients(model[part])
            library = ["library"] * (size <= pipeline.MICROBATCHES)
            for name in (*OURS, *library):
                stage = pipeline.Stage(pipeline.make_model()[part], batch, groups)
                getattr(pipeline, name)(stage)
                for handle in stage.sending:
                    handle.wait()
                difference = (pipeline.gradients(stage.layers) - expected).abs().max().item()
                order = stage.order[-2 * pipeline.MICROBATCHES :]
                found[name, pipeline.MICROBATCHES] = difference, order, len(stage.held)
        return found
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize(("stages", "counts"), [(1, [1, 2]), (2, [1, 3]), (3, [2, 6]), (4, [3, 5])])
def test_gradients_are_those_of_one_process(stages: int, counts: list[int], world: Worlds) -> None:
    """Also with fewer microbatches than stages, which the library refuses."""
    by_rank = world(stages, timeout=300).run(work_by_all, counts)
    for rank, found in enumerate(by_rank):
        assert len(found) == sum(3 + (stages <= microbatches) for microbatches in counts)
        for (name, microbatches), (difference, order, left) in found.items():
            assert difference <= EXACT, (name, microbatches)
            held = idle_and_held(name, stages, microbatches)[1]
            assert (most_held(order), left) == (held[rank], 0), (name, microbatches)
    for microbatches in counts:
        if stages <= microbatches:
            ours, theirs = (
                [found[name, microbatches][1] for found in by_rank]
                for name in ("one_forward_one_backward", "library")
            )
            assert ours == theirs


def orders_of(name: str, stages: int, microbatches: int) -> list[list[str]]:
    """What each stage does by a schedule, on paper."""
    pipeline, orders = lesson(), []
    for rank in range(stages):
        order: list[str] = []
        stage = SimpleNamespace(
            rank=rank,
            last=stages - 1,
            forward=lambda m, order=order: order.append("forward"),
            backward=lambda m, order=order: order.append("backward"),
        )
        pipeline.MICROBATCHES = microbatches
        getattr(pipeline, name)(stage)
        orders.append(order)
    pipeline.MICROBATCHES = 6
    return orders


@given(st.sampled_from(OURS), st.integers(1, 8), st.integers(1, 12))
def test_the_formulas_are_those_of_the_schedules(name: str, stages: int, microbatches: int) -> None:
    """Idle slots as they are drawn, and microbatches that are held."""
    orders = orders_of(name, stages, microbatches)
    rows = lesson().draw(orders)
    idle, held = idle_and_held(name, stages, microbatches)
    assert {len(row) for row in rows} == {round(3 * microbatches / (1 - idle))}
    assert [most_held(order) for order in orders] == held
    for row, order in zip(rows, orders, strict=True):
        assert len(row.replace(".", "")) == 3 * microbatches
        drawn = re.sub(r"([A-Z])\1", r"\1", row.replace(".", ""))
        assert ["backward" if letter.isupper() else "forward" for letter in drawn] == order


def test_the_profile_has_the_bytes_of_the_formula(run_cli: Run, tmp_path: Path) -> None:
    """M * B * T * C numbers to each neighbour, by each schedule."""
    file = tmp_path / "profile.json"
    ran = run_cli("pipeline", "--blocks", 3, "--profile", file)
    assert ran.code == 0, ran.err
    pipeline = lesson()
    each = 8.0 * pipeline.MICROBATCHES * pipeline.SEQUENCES * T * C
    assert f"{each:,.0f} bytes" in (SOURCE.parent / "README.md").read_text(encoding="utf-8")
    sent: defaultdict[str, float] = defaultdict(float)
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        sent[row["function"]] += row["sent"]
    assert sent["forward"] == sent["backward"] == len(OURS) * 2 * each  # of the three stages, two
    assert sent["library"] == pytest.approx(4 * each, rel=0.01)  # and the shapes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "7"], "choose 7 to 26 MICROBATCHES: each has a letter"),
        (["--microbatches", "27"], "choose 3 to 26 MICROBATCHES: each has a letter"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    words: list[str], message: str, run_cli: Run
) -> None:
    shown = run_cli("pipeline", *words)
    assert (shown.code, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert message in shown.err


def broken(pattern: str, replacement: str, folder: Path) -> Path:
    """The program with another line."""
    text, count = re.subn(pattern, replacement, SOURCE.read_text(encoding="utf-8"))
    assert count
    file = folder / "lesson.py"
    file.write_text(text, encoding="utf-8")
    return file


def test_sends_that_wait_stand_still_with_1f1b(run_cli: Run, tmp_path: Path) -> None:
    """And with no other schedule, as the chapter says."""
    pattern = r"self\.sending\.append\(\n\s*dist\.isend\((.*)\)\n\s*\)"
    ran = run_cli("run", "-n", 3, broken(pattern, r"dist.send(\1)", tmp_path))
    assert ran.code == 1, ran.err
    assert re.findall(r"^(\w+):", ran.out, re.MULTILINE) == ["naive", "gpipe"]
    assert ran.err.startswith("playground: deadlock: ")
    assert " in forward " in ran.err
    assert " in backward " in ran.err


def test_a_longer_warm_up_holds_more_and_is_as_fast(run_cli: Run, tmp_path: Path) -> None:
    file = broken(r"stage\.last - stage\.rank\)", "stage.last - stage.rank + 1)", tmp_path)
    ran = run_cli("run", "-n", 3, "--set", "BLOCKS=3", file)
    assert ran.code == 0, ran.err
    _, _, longer, library = re.split(r"^(?=\w)", ran.out, flags=re.MULTILINE)[1:]
    assert "25% of slots idle" in longer
    assert re.findall(r"holds (\d)", longer) == ["4", "3", "2"]
    assert re.findall(r"holds (\d)", library) == ["3", "2", "1"]


def test_a_loss_that_is_not_divided_shows(run_cli: Run, tmp_path: Path) -> None:
    ran = run_cli("run", "-n", 2, broken(r" / MICROBATCHES\n", "\n", tmp_path))
    assert ran.code == 1, ran.err
    *ours, library = map(float, re.findall(r"largest difference (\S+)", ran.out))
    assert min(ours) > 0.1
    assert library <= EXACT


def die_in_a_stage(rank: int, size: int) -> None:
    pipeline = lesson()
    pipeline.BLOCKS, pipeline.MICROBATCHES = 6, 4  # another test may have left others here
    groups = {name: torch.distributed.new_group() for name in ("forward", "backward")}
    batch = make_batch(pipeline.MICROBATCHES * pipeline.SEQUENCES, seed=3)
    part = slice(2 * rank, 2 * rank + 2)
    stage = pipeline.Stage(pipeline.make_model()[part], batch, groups)

    def die(*_: object) -> None:
        if stage.order.count("backward") == 2:
            misbehave("kill")

    if rank == 1:
        stage.layers.register_full_backward_pre_hook(die)
    pipeline.one_forward_one_backward(stage)


def test_a_killed_stage_is_named(world: Worlds) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 of 3 was killed by SIGKILL"):
        world(3).run(die_in_a_stage)


@pytest.mark.gpu
def test_no_kernel_is_launched_first_beside_a_receive(run_cli: Run, pair: int) -> None:
    """A kernel is loaded when the device is idle: a stage that waits for its neighbour never is,
    nor is that one. Receives are posted where they are needed."""
    ran = run_cli("pipeline", "-n", 2, "--backend", "nccl", "--timeout", 30)
    assert ran.code == 0, ran.err
    assert max(map(float, re.findall(r"largest difference (\S+)", ran.out))) <= EXACT
