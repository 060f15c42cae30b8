"""mesh: on every mesh one process's training; the library's groups, shards and training are
ours."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from playground import RankFailed, launch
from playground.lessons.mesh import costs, experiment, library
from playground.lessons.mesh.lesson import AXES, GPTStage, Mesh, groups_along
from playground.lessons.mesh.page import (
    GroupTraffic,
    MeshSettings,
    MeshTraining,
    check_mesh,
    shapes_for,
)
from playground.lessons.pipeline.lesson import split
from playground.lessons.tensor.experiment import shard_like
from playground.lessons.tensor.lesson import GPTConfig, copying, copying_loss, new_gpt
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.tap import ranks_of
from playground.training import gpt_run
from playground.training.gpt_config import LENGTH
from playground.training.one_process import EXACT


@pytest.mark.parametrize(
    ("shapes", "steps"),
    [
        (((2, 2, 2, 1), (2, 1, 2, 2)), 2),
        *(pytest.param(shapes_for(n), 5, marks=pytest.mark.stress) for n in (2, 4, 8, 16)),
    ],
)
def test_each_mesh_is_one_process_and_sends_what_its_closed_form_says(
    world: Worlds, shapes: tuple[costs.Shape, ...], steps: int
) -> None:
    settings = MeshSettings(shapes=shapes, steps=steps)
    for found in world(prod(shapes[0])).run(experiment.run, settings):
        for shape, figures in zip(settings.shapes, found, strict=True):
            check_mesh(shape, figures)


@pytest.mark.stress
@pytest.mark.parametrize(
    "shape", [(3, 1, 1, 1), (1, 4, 1, 1), (1, 1, 3, 1), (1, 1, 1, 3), (3, 1, 1, 2), (1, 1, 3, 2)]
)
def test_other_meshes_are_one_process_too(world: Worlds, shape: costs.Shape) -> None:
    for found in world(prod(shape)).run(experiment.run, MeshSettings(shapes=(shape,))):
        check_mesh(shape, found[0])


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (3, 1, 2, 1), (1, 2, 3, 4)])
def test_ranks_of_a_group_differ_on_its_axes_alone(shape: costs.Shape) -> None:
    coordinates = [dict(zip(AXES, each, strict=True)) for each in product(*map(range, shape))]
    for axes in (("dp",), ("pp",), ("cp",), ("tp",), ("dp", "cp")):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(coordinates):
            groups.setdefault(
                tuple(at for axis, at in place.items() if axis not in axes), []
            ).append(rank)
        assert groups_along(axes, shape) == [*groups.values()]


def find_place(rank: int, size: int) -> tuple[int, ...]:
    return tuple(Mesh((1, 2, 1, 2)).coordinates[axis] for axis in AXES)


def test_the_last_coordinate_changes_fastest(world: Worlds) -> None:
    assert world(4).run(find_place) == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1)]


def compare_with_another_oracle(rank: int, size: int, off: float) -> list[float]:
    """The differences that this rank tells, where rank 1 alone has an oracle that is off."""
    settings = MeshSettings(shapes=((2, 1, 1, 1),), steps=1)
    oracle = experiment.new_model(settings)
    off = off if rank == 1 else 0.0
    oracle[0].tokens.weight.data[3] += off
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "BATCH", 4)
        found = experiment.train_on(
            settings.shapes[0], oracle, torch.tensor([off], dtype=torch.float64), settings
        )
    return [found.loss_difference, found.parameter_difference]


def test_what_is_off_on_one_rank_is_told_by_all(world: Worlds) -> None:
    for off in (100.0, math.nan):
        first, second = world(2).run(compare_with_another_oracle, off)
        assert min(first) > 90
        assert first == second


def train_by_library(
    model: nn.Module, step: gpt_run.Backward, batches: Sequence[gpt_run.Batch]
) -> list[float]:
    """The losses of `gpt_run.train`, which counts memory: a DTensor has none of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpt_run.LR)
    losses = []
    for number, batch in enumerate(batches):
        gpt_run.set_lr(optimizer, number)
        optimizer.zero_grad()
        losses.append(float(step(*batch)))
        optimizer.step()
    return losses


def new_small_gpt() -> torch.nn.Sequential:
    """Three units: an embedding, a block and a head."""
    return new_gpt(GPTConfig(layers=1), seed=1234).double()


def compare_with_the_library(rank: int, size: int, shape: costs.Shape) -> tuple[float, float]:
    """The largest difference of a loss between the library's training and one process's, and of a
    gradient between DistributedDataParallel's and a sum of ours. Groups and shards must be the
    same."""
    mesh, settings = Mesh(shape), MeshSettings(shapes=(shape,), steps=2)
    theirs = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    axes = {axis: theirs[axis] for axis in ("tp", "cp")} | {
        "dp x cp": theirs["dp", "cp"]._flatten("both")
    }
    assert {axis: ranks_of(each.get_group()) for axis, each in axes.items()} == {
        axis: ranks_of(group) for axis, group in mesh.groups.items()
    }
    stage, whole = GPTStage(new_small_gpt(), mesh), new_small_gpt()
    library.apply_tp(whole, theirs["tp"])
    part = library.apply_pp(whole, theirs["pp"]).submod
    for ours, shard in zip(stage.model.parameters(), part.parameters(), strict=True):
        assert ours.equal(shard.to_local() if hasattr(shard, "to_local") else shard)

    def loss_part(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = costs.BATCH * LENGTH // 2
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count

    schedule, model = library.apply_all(new_small_gpt(), shape, loss_part, costs.MICROBATCHES)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        given = (mesh.shard_batch(tokens),) if stage.is_first else ()
        parts = list[torch.Tensor]()
        about = {"target": mesh.shard_batch(targets), "losses": parts} if stage.is_last else {}
        # fully_shard's, of a head that returns a view
        with warnings.catch_warnings(action="ignore"):
            schedule.step(*given, **about)
        loss = torch.tensor(sum(part.item() for part in parts), dtype=torch.float64)
        dist.all_reduce(loss, group=mesh.groups["dp x cp"])
        return loss.item()

    given, alone = experiment.batches_of(settings), new_small_gpt()
    losses = train_by_library(model, step, given)
    expected = gpt_run.train("one process", alone, gpt_run.backward_alone(alone), given).losses
    apart = max(map(abs, map(float.__sub__, losses, expected))) if stage.is_last else 0.0
    ours, replica = (torch.nn.Linear(3, 1, dtype=torch.float64) for _ in range(2))
    ours.load_state_dict(replica.state_dict())
    data = library.apply_ddp(replica, theirs["dp"])
    dist.broadcast(ours.weight.data, 0)
    for each in (ours, data):
        each(torch.full((1, 3), rank + 1.0, dtype=torch.float64)).sum().backward()
    group = theirs["dp"].get_group()
    dist.all_reduce(ours.weight.grad, group=group)
    return apart, (
        ours.weight.grad / dist.get_world_size(group) - replica.weight.grad
    ).abs().max().item()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 2),
        (1, 2, 2, 1),
        *(pytest.param(shape, marks=pytest.mark.stress) for shape in ((2, 1, 1, 2), (2, 2, 2, 1))),
    ],
)
def test_the_library_has_our_groups_our_shards_and_our_training(
    world: Worlds, shape: costs.Shape
) -> None:
    for by_loss, by_gradient in world(prod(shape)).run(compare_with_the_library, shape):
        assert max(by_loss, by_gradient) <= EXACT


def change_placements(rank: int, size: int) -> list[str]:
    """The collectives that a DTensor calls, by row of the chapter's table."""
    mesh, called = init_device_mesh("cpu", (size,)), list[str]()
    rows = (
        (Shard(0), Replicate()),
        (Partial(), Replicate()),
        (Partial(), Shard(0)),
        (Replicate(), Shard(0)),
    )
    for before, after in (*rows, (Shard(0), Shard(1))):
        tensor = DTensor.from_local(torch.ones(size, size), mesh, [before])
        with CommDebugMode() as calls:
            tensor.redistribute(mesh, [after])
        called.append(", ".join(str(call).split(".")[-1] for call in calls.get_comm_counts()))
    return called


def test_a_change_of_placement_calls_what_the_chapter_says(world: Worlds) -> None:
    gather = "all_gather_into_tensor"
    expected = [gather, "all_reduce", "reduce_scatter_tensor", "", gather]
    assert world(2).run(change_placements) == [expected, expected]


def with_remainders(rank: int, size: int, shape: costs.Shape) -> list[float]:
    """The largest difference of a loss and of a gradient from one process's, where some targets are
    ignored, by numbers of samples and microbatches: a replica has more samples than another, or
    none."""
    mesh, settings, found = Mesh(shape), MeshSettings(shapes=(shape,)), []
    for samples, microbatches in ((3, 2), (1, 1), (5, 4)):
        tokens, targets = copying(samples, torch.Generator().manual_seed(3))
        whole = experiment.new_model(settings)
        stage = GPTStage(experiment.new_model(settings), mesh)
        expected = copying_loss(whole(tokens), targets)
        expected.backward()
        loss = stage.step(tokens, targets, microbatches)
        assert not stage.sent  # all has left
        found.append(abs(loss - expected.item()) if stage.is_last else 0.0)
        for ours, theirs in zip(
            stage.model.parameters(),
            split(whole, stage.index, len(mesh.pp_ranks)).parameters(),
            strict=True,
        ):
            found.append(
                (ours.grad - shard_like(theirs.grad, ours, mesh.groups["tp"])).abs().max().item()
            )
    return found


@pytest.mark.parametrize(
    "shape", [(2, 2, 1, 1), pytest.param((2, 1, 2, 1), marks=pytest.mark.stress)]
)
def test_samples_that_replicas_or_microbatches_cannot_share_equally(
    world: Worlds, shape: costs.Shape
) -> None:
    for found in world(4).run(with_remainders, shape):
        assert [each for each in found if not each <= EXACT] == []


def be_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="a mesh of 4 for 2 ranks: the two must be the same"):
        Mesh((2, 2, 1, 1))


def test_a_mesh_for_other_ranks_is_refused(world: Worlds) -> None:
    world(2).run(be_refused)


def die_in_a_step(rank: int, size: int) -> None:
    settings = MeshSettings(shapes=((1, 2, 1, 2),), steps=1)
    stage = GPTStage(experiment.new_model(settings), Mesh(settings.shapes[0]))
    if rank == 3:
        stage.model[0].up.weight.register_hook(
            lambda gradient: os.kill(os.getpid(), signal.SIGKILL)
        )
    gpt_run.train(
        "mesh", stage.model, partial(stage.step, microbatches=2), experiment.batches_of(settings)
    )


def test_a_rank_that_is_killed_in_a_step_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 3 of 4 was killed by SIGKILL"):
        launch(die_in_a_step, 4)


@pytest.mark.parametrize(
    ("size", "grid", "words"),
    [
        (6, None, "6 ranks, and no --grid"),
        (8, (2, 2, 1, 1), "8 ranks, and --grid 2 2 1 1"),
        (5, (5, 1, 1, 1), "5 ranks for 12 pairs of samples"),
        (3, (1, 3, 1, 1), "3 ranks for 4 layers"),
        (5, (1, 1, 1, 5), "5 ranks for 12 heads"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    size: int, grid: costs.Shape | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        MeshSettings(shapes=shapes_for(size, grid))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_difference": 1e-9},
        {"parameter_difference": float("nan")},
        {"groups": {"tp": GroupTraffic([0, 1], {}, sent=2.0, form=1.0)}},
    ],
)
def test_other_numbers_than_promised_are_an_error(changes: dict[str, Any]) -> None:
    counts: dict[str, Any] = {"messages": 0, "sent": 0.0, "kept": 0, "calls": {}}
    exact: dict[str, Any] = {"loss_difference": 0.0, "parameter_difference": 0.0}
    found = MeshTraining(
        losses=[1.0], first=1.0, last=1.0, step_seconds=1.0, place={}, groups={}, **counts, **exact
    )
    check_mesh((2, 1, 1, 1), found)
    with pytest.raises(PlaygroundError, match="2x1x1x1: "):
        check_mesh((2, 1, 1, 1), replace(found, **changes))


def test_a_prediction_is_what_one_computes_by_hand() -> None:
    found = costs.predict((64, 1, 1, 8), "zero-1")
    hidden, own = 2 * 8192 * 8192, 12 * 80 * 8192**2 / 8
    assert found.tensor == pytest.approx(80 * 8 * 4 * (14 * 3e-6 + 14 / 8 * hidden / 400e9))
    assert found.held == pytest.approx(4 * own + 12 * own / 64 + 17 * hidden / 8 * 80)
    assert (found.fits, found.bubble, found.context) == ("yes", 0.0, 0.0)
    assert costs.predict((32, 2, 1, 8), "zero-1").bubble == pytest.approx(
        1 / 16 * (found.compute + found.tensor)
    )


def test_predictions_of_several_cuts_at_once_are_what_one_computes_by_hand() -> None:
    """Of 16 x 2 x 2 x 8 ranks tensor's fill a host: all other groups are rings between hosts."""
    layers = 80
    width = 8192
    length = 8192
    beta = 1 / 50e9
    parameters, whole = 12 * layers * width**2, 2 * length * width
    attention = 6 * layers * length**2 * width / 400e12
    compute = 6 * parameters * length / 400e12 + attention

    found, own = costs.predict((16, 2, 2, 8), "zero-1"), parameters / 16
    assert found.compute == pytest.approx(compute)
    assert found.held == pytest.approx(own * (4 + 12 / 32) + 17 * whole / 2 / 8 * layers / 2 * 2)
    assert found.context == pytest.approx(layers / 2 * 32 * 8 * whole / 2 / 8 * beta - attention)
    assert found.data == pytest.approx(2 * 31 * (1e-5 + 2 * own / 32 * beta) - 2 / 3 * compute / 32)

    found = costs.predict((8, 8, 1, 8), "zero-1")
    assert found.held == pytest.approx(
        parameters / 64 * (4 + 12 / 8) + 17 * whole / 8 * layers / 8 * 8
    )
    assert found.context == 0.0
    assert found.bubble == pytest.approx(7 / 64 * (compute + found.tensor))

    found = costs.predict((64, 1, 8, 1), "zero-3")
    sums = costs.all_reduce_seconds(2 * parameters, 512, 8)
    assert found.held == pytest.approx(16 * parameters / 512 + 17 * whole / 8 * layers)
    assert found.context == pytest.approx(layers * 8 * 44 * whole / 8 / 400e9 - attention)
    assert found.data == pytest.approx(8.5 * sums - compute)
