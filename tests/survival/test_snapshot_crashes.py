"""A process that is killed, or a power failure, while a snapshot is written: the old one or the new one is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from snapshot_disk import Call, Disk, RecordingOS, make_files

from playground.survival import disk
from playground.survival.folder import find_newest
from playground.survival.snapshots import Snapshots, State, load

RANKS = 2
SAVES = 4
RUN = {"lr": 0.1}


def state(rank: int, step: int) -> State:
    """Another one for every rank and step."""
    return State(shared={"weights": torch.full((9,), float(step))}, own={"totals": [rank, step]})


@contextmanager
def open_ranks(folder: Path) -> Iterator[list[Snapshots]]:
    """The snapshots of all ranks of a run, which keeps one."""
    with ExitStack() as stack:
        yield [stack.enter_context(Snapshots(folder, RUN, rank=rank, size=RANKS, keep=1)) for rank in range(RANKS)]


def save(ranks: Sequence[Snapshots], step: int) -> None:
    """Every rank saves, one after the other; the last one gives up what is too old."""
    for rank, snapshots in enumerate(ranks):
        snapshots.save(step, state(rank, step))
        snapshots.wait()
        assert not snapshots.problem


def check_newest(folder: Path) -> int:
    """The step that a run would go on from, 0 if there is none; what is loaded is what was saved then."""
    newest = find_newest(folder, RUN, lambda line: None)
    if newest is None:
        return 0
    for rank in range(RANKS):
        loaded = load(newest, rank)
        assert torch.equal(loaded.shared["weights"], torch.full((9,), float(newest.step)))
        assert loaded.own == {"totals": [rank, newest.step]}
    return newest.step


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Call], list[int]]:
    """The calls of `SAVES` saves, and after how many of them each save had returned on all ranks."""
    recorder, finished = RecordingOS(), []
    with monkeypatch.context() as patched:
        patched.setattr(disk, "os", recorder)
        with open_ranks(tmp_path / "run") as ranks:
            for step in range(1, SAVES + 1):
                save(ranks, step)
                finished.append(len(recorder.calls))
    return recorder.calls, finished


def crashes(root: Path, calls: list[Call], more: int) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """What every prefix of `calls` may leave: all, only what was synced, and `more` mixtures. None twice in a row."""
    replayed, random = Disk(root), Random(7)
    before = None
    for number in range(len(calls) + 1):
        if number:
            replayed.play(calls[number - 1])
        for chance in (1.0, 0.0, *[0.5] * more):
            left = replayed.survivors(chance, random)
            if left != before:
                yield number, left
            before = left


def check_all_crashes(tmp_path: Path, calls: list[Call], finished: list[int], more: int) -> int:
    """After a crash there is the newest snapshot that had been saved, or the one that was being saved."""
    steps = set()
    count = 0
    for count, (number, left) in enumerate(crashes(tmp_path / "run", calls, more), 1):
        folder = tmp_path / f"crash-{count}"
        make_files(folder, left)
        saved = sum(number >= each for each in finished)
        found = check_newest(folder)
        assert saved <= found <= saved + 1, calls[:number]
        steps.add(found)
    assert steps == set(range(SAVES + 1))
    return count


def test_every_prefix_of_the_calls_leaves_the_old_snapshot_or_the_new(
    tmp_path: Path, recorded: tuple[list[Call], list[int]]
) -> None:
    calls, finished = recorded
    kinds = {kind for kind, _, _ in calls}
    assert kinds - {"truncate"} == {"create", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"}
    assert check_all_crashes(tmp_path, calls, finished, more=1) > len(calls)


@pytest.mark.stress
def test_whatever_part_of_the_unsynced_is_lost(tmp_path: Path, recorded: tuple[list[Call], list[int]]) -> None:
    assert check_all_crashes(tmp_path, *recorded, more=20) > 10 * len(recorded[0])


def test_a_run_goes_on_in_the_folder_that_a_crash_has_left(
    tmp_path: Path, recorded: tuple[list[Call], list[int]]
) -> None:
    """What is left of a file, a folder or a removal is in nobody's way, and goes with the next snapshots."""
    calls, _ = recorded
    for count, (_, left) in enumerate(crashes(tmp_path / "run", calls, more=0)):
        if count % 16 == 0:
            folder = tmp_path / f"crash-{count}"
            make_files(folder, left)
            step = check_newest(folder) + 1
            with open_ranks(folder) as ranks:
                for each in (step, step + 1):
                    save(ranks, each)
                    assert check_newest(folder) == each
            older = {name.name for name in folder.iterdir() if name.name <= f"step-{step:08d}"}
            assert older == {".lock"}


@pytest.mark.parametrize(
    "names", [(".snapshot",), ("/run",), ("0001", "0002")], ids=["files", "names of folders", "names of files"]
)
def test_the_replay_notices_what_a_writer_forgets(
    tmp_path: Path, recorded: tuple[list[Call], list[int]], names: tuple[str, ...]
) -> None:
    """Without the sync of files, or of the names in folders, a save that has returned would be lost."""
    calls, finished = recorded

    def is_kept(call: Call) -> bool:
        return call[0] != "fsync" or not call[1].endswith(names)

    fewer = [call for call in calls if is_kept(call)]
    ends = [sum(map(is_kept, calls[:end])) for end in finished]
    with pytest.raises(AssertionError):
        check_all_crashes(tmp_path, fewer, ends, more=0)


def test_a_step_that_is_saved_again_is_there_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went on from a snapshot, and ended before its next step, takes the same one again."""
    recorder = RecordingOS()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "os", recorder)
        with open_ranks(tmp_path / "run") as ranks:
            save(ranks, 1)
        saved = len(recorder.calls)
        with open_ranks(tmp_path / "run") as ranks:
            save(ranks, 1)
            save(ranks, 1)
    for count, (number, left) in enumerate(crashes(tmp_path / "run", recorder.calls, more=2)):
        if number >= saved:
            make_files(tmp_path / f"crash-{count}", left)
            assert check_newest(tmp_path / f"crash-{count}") == 1, recorder.calls[:number]
