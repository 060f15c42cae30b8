"""Training that is killed and goes on ends with the same bits as training that nobody has disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mortals import by_hand, with_ddp

from playground import launch
from playground.lessons.elastic.page import Kill
from playground.runtime import UsageError
from playground.runtime.backends import BACKENDS
from playground.survival.folder import SnapshotFile, find_steps, step_folder
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import State, load_part
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


def last_snapshot(settings: TrainingSettings) -> dict[str, Any]:
    """What every file of the newest snapshot holds; times are no result."""
    assert settings.snapshots
    folder = step_folder(settings.snapshots.folder, find_steps(settings.snapshots.folder)[0])
    found = {file.name: load_part(file) for file in sorted(folder.glob("*.snapshot"))}
    for part in (each["own"] for each in found.values()):
        if "history" in part:
            part["history"].pop("seconds")
            for epoch in part["history"]["finished"]:
                del epoch["seconds"], epoch["samples_per_second"]
    return found


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
        (2, by_hand, [Kill(1, 4)], {}),
        (3, with_ddp, [Kill(0, 6), Kill(2, 8)], {}),
        (3, by_hand, [Kill(2, 1), Kill(1, 10)], {"sync": "overlapped", "all_reduce": "ring"}),
        (2, by_hand, [Kill(0, 9)], {"sync": "parameters", "sync_every": 3}),
        (2, with_ddp, [Kill(1, 5)], {"accumulate": 5, "epochs": 6}),
    ],
    ids=["sgd", "ddp", "overlapped", "local SGD", "accumulate"],
)
def test_the_end_has_the_same_bits(
    size: int, lesson: Any, kills: list[Kill], options: dict[str, Any], settings: TrainingSettings, tmp_path: Path
) -> None:
    assert compare(size, lesson, replace(settings, **options), tmp_path, kills) == []


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(10))
def test_random_kills_leave_the_same_bits(seed: int, settings: TrainingSettings, tmp_path: Path) -> None:
    random = Random(seed)
    size, lesson = random.randint(1, 4), random.choice((by_hand, with_ddp))
    kills = [Kill(random.randrange(size), random.randint(1, 10)) for _ in range(5)]
    assert compare(size, lesson, settings, tmp_path, kills) == []


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
    folder = snapshots_of(settings).folder
    shutil.rmtree(step_folder(folder, 10))  # the end; what is left is within the second epoch
    before = find_steps(folder)
    shorter = train(1, by_hand, replace(settings, epochs=1), [])
    assert len(shorter[0].epochs) == 1
    assert find_steps(folder) == before == [8, 6]
    assert [find_epoch(folder, step) for step in before] == [2, 2]


def find_epoch(folder: Path, step: int) -> int:
    """The epoch in which that snapshot was taken."""
    part = load_part(step_folder(folder, step) / "rank-0.snapshot")
    return int(part["own"]["position"]["epoch"])


def test_a_snapshot_by_name(settings: TrainingSettings) -> None:
    train(1, by_hand, settings, [])
    expected = last_snapshot(settings)
    assert settings.snapshots
    folder = settings.snapshots.folder
    named = replace(settings, snapshots=snapshots_of(settings, resume=str(step_folder(folder, 8))))
    train(1, by_hand, named, [])
    assert differences(last_snapshot(settings), expected) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"lr is 0.01 in the snapshot and 0.5 here"),
        ({"batch_size": 16}, r"batch_size is 32 in the snapshot and 16 here"),
        ({"resume": "no"}, r"holds snapshots \(up to step 10\)"),
        ({"resume": "nowhere"}, r"--resume nowhere: name a snapshot"),
    ],
)
def test_what_belongs_to_another_run_is_refused(
    change: dict[str, Any], message: str, settings: TrainingSettings
) -> None:
    train(1, by_hand, settings, [])
    if "resume" in change:
        change = {"snapshots": snapshots_of(settings, **change)}
    with pytest.raises(UsageError, match=message):
        train(1, by_hand, replace(settings, **change), [])


@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_and_says_what_is_exact(
    before: int, now: int, settings: TrainingSettings
) -> None:
    train(before, by_hand, settings, [])
    folder = snapshots_of(settings).folder
    for step in (10, 8):
        shutil.rmtree(step_folder(folder, step))  # what is left is in the second epoch, one step done
    events: list[Any] = []
    finished = launch(
        run_training, now, args=(by_hand, settings, ([],)), on_report=lambda rank, event: events.append(event)
    )[0].epochs
    notices = [event["notice"] for event in events if "notice" in event and "going on" in event["notice"]]
    assert notices
    assert set(notices) == {notices[0]}
    assert f"from step 6, which {before} took: parameters, optimizer and position are exact" in notices[0]
    assert {event["resumed"]["total"] for event in events if "resumed" in event} == {6}
    assert [epoch.epoch for epoch in finished] == [1, 2]
    assert find_steps(folder)[0] == 10


class Draws:
    """Random numbers of one kind of device, as at a run's start; `torch` and `torch.cuda` have these functions."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.manual_seed, self.set_rng_state = self.generator.manual_seed, self.generator.set_state


def test_ranks_that_are_new_draw_numbers_of_their_own_on_every_kind_of_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = torch.Generator().manual_seed(4).get_state()
    states = [State(own={"history": {}, "random_numbers": {"cpu": taken, "cuda": taken}})]
    snapshot = SnapshotFile(folder=tmp_path, step=6, size=1, fingerprint={"seed": 3})
    drawn: list[list[float]] = []
    for rank in range(3):
        kinds = {"cpu": Draws(), "cuda": Draws()}
        monkeypatch.setattr(resumable, "DRAWS_FROM", kinds)
        own = redistribute(states, rank, snapshot, lambda histories: {}).own
        resumable.ResumableRun.draw_as_before(SimpleNamespace(random_numbers=own["random_numbers"]))  # type: ignore[arg-type]
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
    """What ranks ask of their device: with snapshots, without, and with logical ranks."""
    asked: list[str] = []
    plain = replace(settings, snapshots=None, epochs=1)
    runs = {"snapshots": settings, "nothing": plain, "logical ranks": replace(plain, logical_ranks=2)}
    with pytest.MonkeyPatch.context() as patch:
        for name, run in runs.items():
            patch.setattr(BACKENDS["gloo"], "use_deterministic_kernels", partial(asked.append, name))
            by_hand(rank, size, run, [])
    return asked


def test_where_bits_are_promised_kernels_are_deterministic(settings: TrainingSettings, world: Any) -> None:
    assert world(2, fresh=True).run(with_watched_kernels, settings) == [["snapshots", "logical ranks"]] * 2


def test_parameters_of_each_rank_s_own_are_of_no_use_to_another_number(settings: TrainingSettings) -> None:
    local = replace(settings, sync="parameters", sync_every=3)
    train(1, by_hand, local, [])
    with pytest.raises(UsageError, match="was taken by 1, and the ranks here are 2: with --sync-every, parameters are"):
        train(2, by_hand, local, [])


def test_snapshots_change_nothing(settings: TrainingSettings, world: Callable[..., Any]) -> None:
    plain = world(2).run(run_training, by_hand, replace(settings, snapshots=None), ((),))
    assert [epoch.loss for epoch in train(2, by_hand, settings, [])[0].epochs] == [
        epoch.loss for epoch in plain[0].epochs
    ]
