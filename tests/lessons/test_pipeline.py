"""A model in stages: one process's gradients by every schedule, as little idle time and memory as
promised."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Run, Worlds
from gpus import shown
from hypothesis import given, strategies as st
from ranks import misbehave
from torch import nn

from playground.lessons.memory.lesson import Activations
from playground.lessons.pipeline.experiment import MeasuredStage, new_model
from playground.lessons.pipeline.lesson import Stage, new_groups, split, step
from playground.lessons.pipeline.page import (
    EXACT,
    SCHEDULES,
    PipelineSettings,
    Slot,
    StageResult,
    bubble,
    check,
    summarize,
)
from playground.runtime import PlaygroundError, RankFailed, device
from playground.training.replicas import flatten

BLOCKS, WIDTH = 12, 6
FORWARD, BACKWARD = 1.0, 2.0
"""How long each takes, where schedules are simulated."""


def small_model() -> nn.Sequential:
    return new_model(BLOCKS, WIDTH, seed=1).to(device(), torch.float64)


def small_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    return images.to(device()), torch.randint(10, (samples,), generator=generator).to(device())


def gradients(model: nn.Module) -> torch.Tensor:
    return flatten(param.grad for param in model.parameters())


def expected_gradients(samples: int, stage: int, stages: int) -> torch.Tensor:
    """The gradients of that stage, by one process with the whole batch."""
    model, (images, labels) = small_model(), small_batch(samples)
    F.cross_entropy(model(images), labels).backward()
    return gradients(split(model, stage, stages))


def pipelined(rank: int, size: int, each: int) -> dict[tuple[str, int], tuple[float, int]]:
    """By schedule and number of microbatches of `each` samples: how far this stage's gradients are
    from one process's, and how many microbatches it held."""
    groups, found = new_groups(range(size)), {}
    for microbatches in (1, 5):
        samples = each * microbatches
        expected = expected_gradients(samples, rank, size)
        for name, spec in SCHEDULES.items():
            model = split(small_model(), rank, size)
            stage = MeasuredStage(model, range(size), groups)
            stage.load(*small_batch(samples), microbatches)
            spec.code(stage, microbatches)
            stage.finish()
            assert not stage.held
            difference = (gradients(model) - expected).abs().max().item()
            found[name, microbatches] = difference, stage.most_held
    return found


@pytest.mark.parametrize(
    "stages", [3, *(pytest.param(each, marks=pytest.mark.stress) for each in (1, 2, 4))]
)
def test_gradients_are_those_of_one_process(stages: int, world: Worlds) -> None:
    for rank, found in enumerate(world(stages).run(pipelined, 2)):
        for (name, microbatches), (difference, held) in found.items():
            assert difference <= EXACT, (name, microbatches)
            assert held == SCHEDULES[name].held(rank, stages, microbatches), (name, microbatches)


def with_a_remainder(rank: int, size: int, cases: list[tuple[int, int]]) -> list[tuple[str, float]]:
    """How far gradients are from one process's where some labels are ignored, by numbers of samples
    and microbatches that do not divide them."""
    groups, found = new_groups(range(size)), []
    for samples, microbatches in cases:
        images, labels = small_batch(samples)
        labels[1:2] = -100
        whole = small_model()
        F.cross_entropy(whole(images), labels).backward()
        for name, spec in SCHEDULES.items():
            model = split(small_model(), rank, size)
            stage = Stage(model, range(size), groups)
            stage.load(images, labels, microbatches)
            spec.code(stage, microbatches)
            stage.finish()
            difference = gradients(model) - gradients(split(whole, rank, size))
            found.append((f"{name}, {samples} in {microbatches}", difference.abs().sum().item()))
    return found


def test_microbatches_need_not_divide_the_batch(world: Worlds) -> None:
    for found in world(2).run(with_a_remainder, [(5, 2), (7, 4), (5, 4), (1, 1), (2, 3)]):
        assert [each for each in found if not each[1] <= EXACT] == []


@pytest.mark.parametrize("layers", [4, 5, 11])
def test_stages_share_out_all_layers(layers: int) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(layers)))
    for stages in range(1, layers + 1):
        parts = [split(model, stage, stages) for stage in range(stages)]
        assert [layer for part in parts for layer in part] == [*model]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ValueError, match="2 layers for 3 stages: each needs one, so choose fewer stages"
    ):
        split(nn.Sequential(nn.Identity(), nn.Identity()), 0, 3)


def train_in_steps(rank: int, size: int) -> list[tuple[str, float]]:
    """The largest difference from one process after three steps of SGD with momentum, of this
    stage's parameters and, on the last stage, of a loss, by schedule. The stages have different
    numbers of layers."""
    found, groups = [], new_groups(range(size))
    for name, spec in SCHEDULES.items():
        whole, own = small_model()[-5:], split(small_model()[-5:], rank, size)
        stage = Stage(own, range(size), groups)
        alone, ours = (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (whole, own)
        )
        for samples in (6, 5, 7):
            images, labels = small_batch(samples)
            alone.zero_grad()
            expected = F.cross_entropy(whole(images), labels)
            expected.backward()
            alone.step()
            loss = step(stage, spec.code, ours, images, labels, 3)
            if stage.is_last:
                found.append((f"{name}: loss", abs(loss - expected.item())))
        pairs = zip(own.parameters(), split(whole, rank, size).parameters(), strict=True)
        found.append((name, max((param - other).abs().max().item() for param, other in pairs)))
        assert not stage.sent
        assert not stage.posted
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, pytest.param(4, marks=pytest.mark.stress)])
def test_steps_are_those_of_one_process(stages: int, world: Worlds) -> None:
    *_, last = by_rank = world(stages).run(train_in_steps)
    assert len(last) == len(SCHEDULES) * 4
    assert [each for found in by_rank for each in found if not each[1] <= EXACT] == []


def in_two_pipelines(rank: int, size: int) -> float:
    """How far gradients are from one process's, in one of two pipelines whose stages are on every
    other rank."""
    groups = [new_groups(range(first, size, 2)) for first in (0, 1)][rank % 2]
    ranks, own = range(rank % 2, size, 2), split(small_model(), rank // 2, size // 2)
    stage = Stage(own, ranks, groups)
    step(
        stage, SCHEDULES["1f1b"].code, torch.optim.SGD(own.parameters(), lr=0.1), *small_batch(6), 3
    )
    return (gradients(own) - expected_gradients(6, rank // 2, size // 2)).abs().max().item()


def test_several_pipelines_share_a_world(world: Worlds) -> None:
    assert max(world(4).run(in_two_pipelines)) <= EXACT


TORCH_S_OWN = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


def beside_torch_s_own(rank: int, size: int, microbatches: int) -> dict[str, float]:
    """How far our gradients are from those of torch.distributed.pipelining, by schedule."""
    from torch.distributed import pipelining

    groups, found = new_groups(range(size)), {}
    images, labels = small_batch(2 * microbatches)
    for name, theirs in TORCH_S_OWN.items():
        models = [split(small_model(), rank, size) for _ in range(2)]
        stage = Stage(models[0], range(size), groups)
        stage.load(images, labels, microbatches)
        SCHEDULES[name].code(stage, microbatches)
        stage.finish()
        theirs_stage = pipelining.PipelineStage(models[1], rank, size, device())
        schedule = getattr(pipelining, theirs)(theirs_stage, microbatches, loss_fn=F.cross_entropy)
        schedule.step(*[images][: stage.is_first], **({"target": labels} if stage.is_last else {}))
        found[name] = (gradients(models[0]) - gradients(models[1])).abs().max().item()
    return found


@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(2, 3), *(pytest.param(*pair, marks=pytest.mark.stress) for pair in [(3, 3), (4, 8)])],
)
def test_gradients_are_those_of_torch_s_own_schedules(
    stages: int, microbatches: int, world: Worlds
) -> None:
    for found in world(stages).run(beside_torch_s_own, microbatches):
        assert found.keys() == TORCH_S_OWN.keys()
        assert max(found.values()) <= EXACT


def counted_bytes(rank: int, size: int, microbatches: int) -> dict[str, tuple[int, int]]:
    """By schedule: the bytes that autograd saved, at most, and the microbatches that were held."""
    groups, found = new_groups(range(size)), {}
    for name, spec in SCHEDULES.items():
        stage = MeasuredStage(split(small_model(), rank, size), range(size), groups)
        stage.load(*small_batch(3 * microbatches), microbatches)
        counter = Activations(stage.model)
        with counter:
            spec.code(stage, microbatches)
        stage.finish()
        assert counter.held == 0
        found[name] = counter.peak, stage.most_held
    return found


def test_activations_take_as_many_bytes_as_microbatches_are_held(world: Worlds) -> None:
    for found in world(2).run(counted_bytes, 3):
        one, held = found["naive"]
        assert held == 1
        assert one >= 6 * 3 * WIDTH * 8  # what six blocks have saved
        assert {name: peak / held for name, (peak, held) in found.items()} == dict.fromkeys(
            found, one
        )


class SimulatedStage:
    """Carries out a schedule on paper: what is done, and in which order."""

    def __init__(self, stage: int, stages: int) -> None:
        self.index, self.ranks = stage, range(stages)
        self.order: list[tuple[str, int]] = []
        self.forward, self.backward = (
            lambda m, kind=kind: self.order.append((kind, m)) for kind in "FB"
        )


def simulate(name: str, stages: int, microbatches: int) -> list[list[Slot]]:
    """What each stage does, and when, if nothing but computing takes time."""
    paper = [SimulatedStage(stage, stages) for stage in range(stages)]
    for stage in paper:
        SCHEDULES[name].code(stage, microbatches)
    ends: dict[tuple[int, str, int], float] = {}
    steps: list[list[Slot]] = [[] for _ in paper]
    while any(stage.order for stage in paper):
        before = len(ends)
        for s, (stage, done) in enumerate(zip(paper, steps, strict=True)):
            kind, m = stage.order[0] if stage.order else ("", 0)
            neighbour = (s - 1, "F", m) if kind == "F" else (s + 1, "B", m)
            if kind and (neighbour in ends or not 0 <= neighbour[0] < stages):
                start = max(ends.get(neighbour, 0.0), done[-1].end if done else 0.0)
                ends[s, kind, m] = start + (FORWARD if kind == "F" else BACKWARD)
                done.append(Slot(kind, m, start, ends[s, kind, m]))
                stage.order.pop(0)
        assert len(ends) > before, "a deadlock"
    return steps


@given(st.sampled_from([*SCHEDULES]), st.integers(1, 8), st.integers(1, 12))
def test_the_formulas_are_those_of_the_schedules(name: str, stages: int, microbatches: int) -> None:
    steps, spec = simulate(name, stages, microbatches), SCHEDULES[name]
    assert bubble(steps) == pytest.approx(spec.bubble(stages, microbatches))
    for stage, slots in enumerate(steps):
        assert Counter((slot.kind, slot.microbatch) for slot in slots) == Counter(
            (kind, m) for kind in "FB" for m in range(microbatches)
        )
        held = [
            sum(1 if slot.kind == "F" else -1 for slot in slots[: place + 1])
            for place in range(len(slots))
        ]
        assert (max(held), held[-1]) == (spec.held(stage, stages, microbatches), 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "5"], "choose a divisor of 24"),
        (["--batch-size", "12"], "choose a multiple of 8"),
        (["--batch-size", "608", "--dataset", "digits"], "choose no more"),
    ],
)
@pytest.mark.usefixtures("few_digits")
def test_bad_input(words: list[str], message: str, run_cli: Run) -> None:
    shown = run_cli("pipeline", *words)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert message in shown.err


@pytest.mark.usefixtures("few_digits")
def test_the_lesson_as_json(run_cli: Run) -> None:
    words = "--dataset digits --batch-size 8 --steps 1 --microbatches 2"
    shown = run_cli("pipeline", *words.split(), "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert (document["stages"], document["microbatches"]) == (2, 2)
    schedules = document["schedules"].values()
    assert [schedule["held"] for schedule in schedules] == [[1, 1], [2, 2], [2, 1]]
    assert [schedule["losses"] for schedule in schedules] == [
        document["schedules"]["naive"]["losses"]
    ] * 3
    for schedule in schedules:
        assert schedule["gradient_difference"] <= EXACT
        assert 0 < schedule["bubble"] < 1


@pytest.mark.parametrize(
    "changes", [{"gradient_difference": 1e-9}, {"gradient_difference": float("nan")}, {"held": 2}]
)
def test_what_is_not_as_promised_is_an_error(changes: dict[str, Any], tmp_path: Path) -> None:
    slot = Slot("F", 0, start=0.0, end=1.0)
    rank = StageResult(0.0, held=1, held_bytes=1, losses=[1.0], steps=[[slot]])
    settings = PipelineSettings(size=1, folder=tmp_path, microbatches=1)
    check("gpipe", summarize("gpipe", [rank], settings))
    with pytest.raises(PlaygroundError, match="must not be"):
        check("gpipe", summarize("gpipe", [replace(rank, **changes)], settings))


class DyingStage(Stage):
    """Is killed in its second backward."""

    def backward(self, m: int) -> None:
        if m == 1:
            misbehave("kill")
        super().backward(m)


def die_in_a_stage(rank: int, size: int) -> None:
    stage = (DyingStage if rank == 1 else Stage)(
        split(small_model(), rank, size), range(size), new_groups(range(size))
    )
    stage.load(*small_batch(8), 4)
    SCHEDULES["1f1b"].code(stage, 4)
    stage.finish()


def test_a_killed_stage_is_named(world: Worlds) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 of 3 was killed by SIGKILL"):
        world(3).run(die_in_a_stage)


@pytest.mark.gpu
@pytest.mark.usefixtures("few_digits")
def test_no_kernel_is_launched_first_beside_a_receive(run_cli: Run, pair: int) -> None:
    """A kernel is loaded when the device is idle: a stage that waits for its neighbour never is,
    nor is that one."""
    data = (
        "--dataset",
        "digits",
        "--batch-size",
        16,
        "--microbatches",
        4,
        "--steps",
        1,
    )
    document = shown(run_cli, "pipeline", "-n", 2, *data, "--schedule", "1f1b", "--timeout", 30)
    assert document["schedules"]["1f1b"]["gradient_difference"] <= EXACT
