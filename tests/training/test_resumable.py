"""Training that is killed and goes on ends with the same bits as training that nobody has disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mortals import by_hand, with_ddp

from playground import launch
from playground.lessons.elastic.page import Kill
from playground.runtime import UsageError
from playground.runtime.backends import BACKENDS
from playground.survival.folder import find_snapshots
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import Snapshot, read_snapshot
from playground.training import resumable
from playground.training.results import TrainingResult
from playground.training.resumable import redistribute
from playground.training.run import run_training
from playground.training.settings import TrainingSettings


@pytest.fixture
def settings(digits_folder: Path, tmp_path: Path) -> TrainingSettings:
    """Two epochs of five steps, and a test after each."""
    return TrainingSettings(
        folder=digits_folder, epochs=2, batch_size=32, limit=150,
        snapshots=SnapshotSettings(folder=tmp_path / "snapshots", every=2),
    )  # fmt: skip


def train(size: int, lesson: Any, settings: TrainingSettings, kills: list[Kill]) -> list[TrainingResult]:
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


def last_snapshot(settings: TrainingSettings) -> dict[str, Any]:
    """What the newest snapshot holds; times are no result."""
    found = read_snapshot(find_snapshots(snapshots_of(settings).folder)[0][1])
    for own in found.own:
        own["history"].pop("seconds")
        for epoch in own["history"]["finished"]:
            del epoch["seconds"], epoch["samples_per_second"]
    return vars(found)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nested structures of plain data and tensors are not equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict) and one.keys() == other.keys():
        return [each for key in one for each in differences(one[key], other[key], f"{where} {key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for number, pair in pairs for each in differences(*pair, f"{where} {number}")]
    return [] if one == other else [where]


def compare(size: int, lesson: Any, settings: TrainingSettings, tmp_path: Path, kills: list[Kill]) -> list[str]:
    """Train undisturbed, and with these kills. Where the last snapshots or the losses differ."""
    undisturbed = replace(settings, snapshots=snapshots_of(settings, folder=tmp_path / "undisturbed"))
    runs = [train(size, lesson, *run)[0] for run in ((undisturbed, []), (settings, kills))]
    losses = [[epoch.loss for epoch in run.epochs] for run in runs]
    return [
        *differences(last_snapshot(undisturbed), last_snapshot(settings)),
        *differences(losses[0], losses[1], "losses"),
    ]


@pytest.mark.parametrize(
    ("size", "lesson", "kills", "options"),
    [
        (2, by_hand, [(1, 4)], {}),
        (3, with_ddp, [(0, 6), (2, 8)], {}),
        (3, by_hand, [(2, 1), (1, 10)], {"sync": "overlapped", "all_reduce": "ring"}),
        (2, by_hand, [(0, 9)], {"sync": "parameters", "sync_every": 3}),
        (2, with_ddp, [(1, 5)], {"accumulate": 5, "epochs": 6}),
    ],
    ids=["sgd", "ddp", "overlapped", "local SGD", "accumulate"],
)
def test_the_end_has_the_same_bits(
    size: int, lesson: Any, kills: list[Kill], options: dict[str, Any], settings: TrainingSettings, tmp_path: Path
) -> None:
    assert compare(size, lesson, replace(settings, **options), tmp_path, kills) == []


def test_a_run_that_ended_goes_on_for_more_epochs(settings: TrainingSettings, tmp_path: Path) -> None:
    longer = replace(settings, epochs=3)
    train(2, by_hand, settings, [])
    train(2, by_hand, longer, [])
    at_once = replace(longer, snapshots=snapshots_of(settings, folder=tmp_path / "at once"))
    train(2, by_hand, at_once, [])
    assert differences(last_snapshot(longer), last_snapshot(at_once)) == []
    again = train(2, by_hand, longer, [])
    assert len(again[0].epochs) == 3


def test_a_run_that_is_beyond_its_last_epoch_leaves_the_snapshots_as_they_are(settings: TrainingSettings) -> None:
    """Asked for fewer epochs than it has begun, it takes no step, and the epoch it was in is not finished."""
    train(1, by_hand, settings, [])
    find_snapshots(snapshots_of(settings).folder)[0][1].unlink()  # the end; what is left is within the second epoch
    shorter = train(1, by_hand, replace(settings, epochs=1), [])
    assert len(shorter[0].epochs) == 1
    assert steps_of(settings) == [8, 6]
    assert last_snapshot(settings)["shared"]["position"] == {"epoch": 2, "step": 3, "total": 8}


@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_and_says_what_is_exact(
    before: int, now: int, settings: TrainingSettings
) -> None:
    train(before, by_hand, settings, [])
    for _, file in find_snapshots(snapshots_of(settings).folder)[:2]:
        file.unlink()  # what is left is in the second epoch, one step done
    events: list[Any] = []
    finished = launch(
        run_training, now, args=(by_hand, settings, ([],)), on_report=lambda rank, event: events.append(event)
    )[0].epochs
    exact = "parameters, optimizer and position are exact; samples, dropout masks and rounding differ"
    notices = {event["notice"] for event in events if "notice" in event}
    assert notices == {f"{before} ranks took the snapshot of step 6, {now} resume: {exact}"}
    assert {event["resumed"]["total"] for event in events if "resumed" in event} == {6}
    assert [epoch.epoch for epoch in finished] == [1, 2]
    assert steps_of(settings)[0] == 10


class Draws:
    """Random numbers of one kind of device, as at a run's start; `torch` and `torch.cuda` have these functions."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.manual_seed, self.set_rng_state = self.generator.manual_seed, self.generator.set_state


def test_ranks_that_are_new_draw_numbers_of_their_own_on_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = torch.Generator().manual_seed(4).get_state()
    own = {"history": {}, "random_numbers": {"cpu": taken, "cuda": taken}}
    snapshot = Snapshot(step=6, fingerprint={"seed": 3}, shared={}, own=[own])
    history: Any = SimpleNamespace(combine=lambda histories: {})
    drawn: list[list[float]] = []
    for rank in range(3):
        kinds = {"cpu": Draws(), "cuda": Draws()}
        monkeypatch.setattr(resumable, "DRAWS_FROM", kinds)
        mine = redistribute(snapshot, rank, history)
        resumable.ResumableRun.draw_as_before(SimpleNamespace(random_numbers=mine["random_numbers"]))  # type: ignore[arg-type]
        drawn += [[torch.rand(1, generator=kind.generator).item() for kind in kinds.values()]]
    assert drawn[0] == 2 * [torch.rand(1, generator=torch.Generator().manual_seed(4)).item()]
    for of_kind in zip(*drawn, strict=True):
        assert len({*of_kind, torch.rand(1, generator=Draws().generator).item()}) == 4


def on_another_device(rank: int, size: int, settings: TrainingSettings, kills: list[Kill]) -> TrainingResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumable, "device", lambda: torch.device("cuda"))
        return by_hand(rank, size, settings, kills)


def test_another_kind_of_device_does_not_go_on(settings: TrainingSettings) -> None:
    """It rounds otherwise, and has random numbers of its own."""
    train(1, by_hand, settings, [])
    with pytest.raises(UsageError, match="device is cpu in the snapshot and cuda here"):
        train(1, on_another_device, settings, [])


def with_watched_kernels(rank: int, size: int, settings: TrainingSettings) -> list[str]:
    """What ranks ask of their device: with snapshots, and without."""
    asked: list[str] = []
    runs = {"snapshots": settings, "nothing": replace(settings, snapshots=None, epochs=1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, run in runs.items():
            patch.setattr(BACKENDS["gloo"], "use_deterministic_kernels", partial(asked.append, name))
            by_hand(rank, size, run, [])
    return asked


def test_where_bits_are_promised_kernels_are_deterministic(settings: TrainingSettings, world: Any) -> None:
    assert world(2, fresh=True).run(with_watched_kernels, settings) == [["snapshots"]] * 2


def test_parameters_of_each_rank_s_own_are_of_no_use_to_another_number(settings: TrainingSettings) -> None:
    local = replace(settings, sync="parameters", sync_every=3)
    train(1, by_hand, local, [])
    with pytest.raises(UsageError, match="ranks is 1 in the snapshot and 2 here; choose another folder"):
        train(2, by_hand, local, [])


def test_snapshots_change_nothing(settings: TrainingSettings, world: Callable[..., Any]) -> None:
    plain = world(2).run(run_training, by_hand, replace(settings, snapshots=None), ((),))
    assert [epoch.loss for epoch in train(2, by_hand, settings, [])[0].epochs] == [
        epoch.loss for epoch in plain[0].epochs
    ]
