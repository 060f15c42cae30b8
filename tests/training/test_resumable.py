"""Training that is killed and goes on ends with the same bits as training that nobody has
disturbed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Worlds
from general_loop import train_by_hand
from gpus import COLD
from mortals import by_hand, with_ddp

from playground import launch
from playground.checkpoint.folder import SnapshotSettings, find_snapshots
from playground.checkpoint.snapshots import Snapshot, read_snapshot
from playground.lessons.elastic.experiment import compare
from playground.lessons.elastic.page import Kill
from playground.runtime import UsageError
from playground.runtime.backends import BACKENDS
from playground.testing import World
from playground.training import resumable
from playground.training.loop import run_training, train_with_ddp
from playground.training.results import TrainingResult
from playground.training.resumable import redistribute
from playground.training.settings import TrainingSettings


@pytest.fixture
def settings(digits_folder: Path, tmp_path: Path) -> TrainingSettings:
    """Two epochs of five steps, and a test after each."""
    return TrainingSettings(
        folder=digits_folder, epochs=2, batch_size=8, limit=38,
        snapshots=SnapshotSettings(folder=tmp_path / "snapshots", every=2),
    )  # fmt: skip


def train(
    size: int, lesson: Any, settings: TrainingSettings, kills: list[Kill]
) -> list[TrainingResult]:
    """Train; the n-th time that the world is started, the n-th of `kills` happens."""
    return launch(
        run_training, size, args=(lesson, settings, (kills,)), restarts=len(kills),
        on_restart=lambda failure, count: None,
    )  # fmt: skip


def snapshots_of(settings: TrainingSettings, **changes: Any) -> SnapshotSettings:
    assert settings.snapshots
    return replace(settings.snapshots, **changes)


def steps_of(settings: TrainingSettings) -> list[int]:
    return [step for step, _ in find_snapshots(snapshots_of(settings).folder)]


def count_differing(one: TrainingSettings, other: TrainingSettings) -> int:
    """The bytes by which their last snapshots differ."""
    return int(compare(0, 1, *(snapshots_of(each).folder for each in (one, other))).differing)


@pytest.mark.parametrize(
    ("size", "lesson", "kills", "options"),
    [
        (3, with_ddp, [(0, 6), (2, 8)], {}),
        (2, by_hand, [(0, 9)], {"sync": "parameters", "sync_every": 3}),
        pytest.param(
            3,
            by_hand,
            [(2, 1), (1, 10)],
            {"sync": "overlapped", "all_reduce": "ring"},
            marks=pytest.mark.stress,
        ),
        pytest.param(
            2, with_ddp, [(1, 5)], {"accumulate": 5, "epochs": 6}, marks=pytest.mark.stress
        ),
    ],
    ids=["ddp", "local SGD", "overlapped", "accumulate"],
)
def test_the_end_has_the_same_bits(
    size: int,
    lesson: Any,
    kills: list[Kill],
    options: dict[str, Any],
    settings: TrainingSettings,
    tmp_path: Path,
) -> None:
    settings = replace(settings, **options)
    undisturbed = replace(
        settings, snapshots=snapshots_of(settings, folder=tmp_path / "undisturbed")
    )
    expected, run = train(size, lesson, undisturbed, [])[0], train(size, lesson, settings, kills)[0]
    assert [epoch.loss for epoch in run.epochs] == [epoch.loss for epoch in expected.epochs]
    assert count_differing(undisturbed, settings) == 0


def test_local_sgd_averages_at_the_same_steps_after_a_resume(
    settings: TrainingSettings, tmp_path: Path
) -> None:
    """Resumed after step 8: the next average is due after step 9."""
    local = replace(settings, sync="parameters", sync_every=3)
    undisturbed = replace(local, snapshots=snapshots_of(local, folder=tmp_path / "undisturbed"))
    train(2, by_hand, undisturbed, [])
    shutil.copytree(snapshots_of(undisturbed).folder, snapshots_of(local).folder)
    find_snapshots(snapshots_of(local).folder)[0][1].unlink()
    assert steps_of(local)[0] == 8
    train(2, by_hand, local, [])
    assert count_differing(undisturbed, local) == 0


def test_a_run_that_ended_goes_on_for_more_epochs(
    settings: TrainingSettings, tmp_path: Path
) -> None:
    longer = replace(settings, epochs=3)
    train(2, by_hand, settings, [])
    train(2, by_hand, longer, [])
    at_once = replace(longer, snapshots=snapshots_of(settings, folder=tmp_path / "at once"))
    train(2, by_hand, at_once, [])
    assert count_differing(longer, at_once) == 0


def test_a_run_that_is_beyond_its_last_epoch_leaves_the_snapshots_as_they_are(
    settings: TrainingSettings,
) -> None:
    """Asked for fewer epochs than it has begun, it takes no step, and the epoch it was in is not
    finished."""
    train(1, by_hand, settings, [])
    # the end; what is left is within the second epoch
    find_snapshots(snapshots_of(settings).folder)[0][1].unlink()
    shorter = train(1, by_hand, replace(settings, epochs=1), [])
    assert len(shorter[0].epochs) == 1
    assert steps_of(settings) == [8, 6]
    position = read_snapshot(find_snapshots(snapshots_of(settings).folder)[0][1]).shared["position"]
    assert position == {"epoch": 2, "step": 3, "total": 8}


def test_another_number_of_ranks_goes_on_and_says_what_is_exact(settings: TrainingSettings) -> None:
    before, now = 2, 3
    train(before, by_hand, settings, [])
    for _, file in find_snapshots(snapshots_of(settings).folder)[:2]:
        file.unlink()  # what is left is in the second epoch, one step done
    events: list[Any] = []
    finished = launch(
        run_training,
        now,
        args=(by_hand, settings, ([],)),
        on_report=lambda rank, event: events.append(event),
    )[0].epochs
    exact = (
        "parameters, optimizer and position are exact; samples, dropout masks and rounding differ"
    )
    notices = {event["notice"] for event in events if "notice" in event}
    assert notices == {f"{before} ranks took the snapshot of step 6, {now} resume: {exact}"}
    assert {event["resumed"]["total"] for event in events if "resumed" in event} == {6}
    assert [epoch.epoch for epoch in finished] == [1, 2]
    assert steps_of(settings)[0] == 10


def test_parameters_of_each_rank_s_own_are_of_no_use_to_another_number(
    settings: TrainingSettings,
) -> None:
    local = replace(settings, sync="parameters", sync_every=3)
    train(1, by_hand, local, [])
    with pytest.raises(
        UsageError, match="ranks is 1 in the snapshot and 2 here; choose another folder"
    ):
        train(2, by_hand, local, [])


def on_another_device(
    rank: int, size: int, settings: TrainingSettings, kills: list[Kill]
) -> TrainingResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumable, "device", lambda: torch.device("cuda"))
        return by_hand(rank, size, settings, kills)


def test_what_belongs_to_another_run_is_refused(settings: TrainingSettings) -> None:
    """Another kind of device, too: it rounds otherwise, and has random numbers of its own."""
    train(1, by_hand, replace(settings, epochs=1), [])
    for changed, message in (
        (replace(settings, lr=0.5), "lr is 0.01 in the snapshot and 0.5 here"),
        (replace(settings, batch_size=16), "batch_size is 8 in the snapshot and 16 here"),
        (replace(settings, sync="flat"), "sync is per-parameter in the snapshot and flat here"),
    ):
        with pytest.raises(UsageError, match=message):
            train(1, by_hand, changed, [])
    with pytest.raises(UsageError, match="device is cpu in the snapshot and cuda here"):
        train(1, on_another_device, settings, [])


def with_watched_kernels(
    rank: int, size: int, settings: TrainingSettings
) -> tuple[list[str], list[list[float]]]:
    """What ranks ask of their device, without snapshots and with them; the losses of both."""
    asked: list[str] = []
    runs = {"nothing": replace(settings, snapshots=None), "snapshots": settings}
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        for name, run in runs.items():
            patch.setattr(
                BACKENDS["gloo"], "use_deterministic_kernels", partial(asked.append, name)
            )
            losses.append([epoch.loss for epoch in by_hand(rank, size, run, []).epochs])
    return asked, losses


def test_where_bits_are_promised_kernels_are_deterministic_and_nothing_else_changes(
    settings: TrainingSettings, world: Any
) -> None:
    for asked, (plain, with_snapshots) in world(2).run(with_watched_kernels, settings):
        assert (asked, plain) == (["snapshots"], with_snapshots)


def test_other_data_are_another_run(settings: TrainingSettings, tmp_path: Path) -> None:
    train(1, by_hand, settings, [])
    other = replace(settings, folder=tmp_path / "other")
    shutil.copytree(settings.folder, other.folder)
    labels = other.folder / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x0a")
    with pytest.raises(
        UsageError, match=r"data is .* in the snapshot and .* here; choose another folder"
    ):
        train(1, by_hand, other, [])


def test_new_ranks_draw_numbers_that_no_other_rank_and_no_other_step_draws() -> None:
    """Those of before keep theirs, totals stay what they are in all, and with fewer ranks nobody is
    new."""
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    own = [
        {
            "random_numbers": {"cpu": state, "cuda": state},
            "history": {"total": torch.tensor([number + 1.0])},
        }
        for number, state in enumerate(states)
    ]

    def resume(size: int, step: int = 6) -> list[Any]:
        snapshot = Snapshot(step=step, fingerprint={"seed": 1}, shared={}, own=own)
        return [redistribute(snapshot, rank) for rank in range(size)]

    for size in (1, 4):
        found = resume(size)
        assert [each["history"]["total"].item() for each in found] == [3.0, 0.0, 0.0, 0.0][:size]
        for each, state in zip(found, states, strict=False):
            assert all(kept.equal(state) for kept in each["random_numbers"].values())
    new = [each["random_numbers"] for step in (6, 7) for each in resume(4, step)[2:]]
    seeds = {seed for numbers in new for seed in numbers.values()}
    assert (len(seeds), {type(seed) for seed in seeds}, {*map(tuple, new)}) == (
        4,
        {int},
        {("cpu", "cuda")},
    )
    assert [each["random_numbers"] for each in resume(4)[2:]] == new[:2]


@pytest.mark.gpu
def test_training_ends_with_the_same_bits(
    nccl_size: int, digits_folder: Path, tmp_path: Path, world: Worlds
) -> None:
    """Once whole, and once in two parts, with all processes new in between: the last snapshots,
    byte by byte."""
    for name, epochs in (("whole", 2), ("parts", 1), ("parts", 2)):
        settings = TrainingSettings(
            folder=digits_folder, epochs=epochs, batch_size=32, limit=150,
            snapshots=SnapshotSettings(folder=tmp_path / name, every=3),
        )  # fmt: skip
        ranks = world(nccl_size, backend="nccl", timeout=COLD, fresh=True)
        ranks.run(train_with_ddp, settings)
    [found] = world(1, backend="nccl", timeout=COLD).run(
        compare, tmp_path / "whole", tmp_path / "parts"
    )
    assert found.nbytes > 87_360
    assert found.differing == 0


def train_and_tell_seed(rank: int, size: int, settings: TrainingSettings) -> int:
    train_by_hand(rank, size, settings)
    return torch.cuda.initial_seed()


@pytest.mark.gpu
def test_new_ranks_draw_masks_of_their_own(
    pair: int, nccl: World, world: Worlds, digits_folder: Path, tmp_path: Path
) -> None:
    """Training begun by one rank goes on with more: none of them has the random numbers of a run's
    start."""
    settings = TrainingSettings(
        folder=digits_folder,
        epochs=1,
        batch_size=32,
        limit=150,
        snapshots=SnapshotSettings(folder=tmp_path, every=2),
    )
    first = settings.seed + 1
    assert world(1, backend="nccl", timeout=COLD).run(train_and_tell_seed, settings) == [first]
    seeds = nccl.run(train_and_tell_seed, replace(settings, epochs=2))
    assert seeds[0] == first
    assert len({*seeds[1:]} - {*range(first, first + pair)}) == pair - 1
