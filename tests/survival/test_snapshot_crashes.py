"""A process that is killed, or a power failure, while a snapshot is written: the old one or the new one is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from snapshot_disk import Call, Disk, RecordingOS, make_files

from playground.survival import folder as under_test
from playground.survival.folder import KEPT, find_snapshots, name_file, write_snapshot

SAVES = KEPT + 2


def content(step: int) -> bytes:
    """Several blocks of the disk, others for every step."""
    return bytes([step]) * 500


def check_newest(folder: Path) -> int:
    """The newest step whose snapshot is whole, 0 if there is none. Whatever has the name of one is whole."""
    for step, file in find_snapshots(folder):
        assert file.read_bytes() == content(step)
    return next((step for step, _ in find_snapshots(folder)), 0)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Call], list[int]]:
    """The calls of `SAVES` saves, and after how many of them each save had returned on all ranks."""
    recorder, finished = RecordingOS(), []
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(under_test, "os", recorder)
        for step in range(1, SAVES + 1):
            write_snapshot(tmp_path / "run", step, content(step))
            finished.append(len(recorder.calls))
    return recorder.calls, finished


def crashes(root: Path, calls: list[Call], more: int) -> Iterator[tuple[int, dict[str, bytes]]]:
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
    assert kinds == {"create", "write", "fsync", "rename", "unlink"}
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
            for each in range(step, step + KEPT):
                write_snapshot(folder, each, content(each))
                assert check_newest(folder) == each
            assert {file.name for file in folder.iterdir()} == {
                name_file(each, content(each)) for each in range(step, step + KEPT)
            }


@pytest.mark.parametrize("name", ["/.unfinished", "/run"], ids=["files", "names"])
def test_the_replay_notices_what_a_writer_forgets(
    tmp_path: Path, recorded: tuple[list[Call], list[int]], name: str
) -> None:
    """Without the sync of files, or of the names in the folder, a save that has returned would be lost."""
    calls, finished = recorded

    def is_kept(call: Call) -> bool:
        return call[0] != "fsync" or not call[1].endswith(name)

    fewer = [call for call in calls if is_kept(call)]
    ends = [sum(map(is_kept, calls[:end])) for end in finished]
    with pytest.raises(AssertionError):
        check_all_crashes(tmp_path, fewer, ends, more=0)
