"""What a run goes on from: the newest snapshot, one that is named, or none. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.training.snapshots.fingerprint import Fingerprint
from playground.training.snapshots.folder import (
    SnapshotFile,
    check_same_run,
    examine,
    find_newest,
    require_unused,
    step_of,
)
from playground.training.snapshots.settings import AUTO, NO, SnapshotSettings


def choose_snapshot(
    settings: SnapshotSettings, fingerprint: Fingerprint, restarted: bool, say: Callable[[str], None]
) -> SnapshotFile | None:
    """The snapshot to go on from; None to begin at the start. A run that was `restarted` takes the newest. However
    many ranks took it: whether others can go on from it is not decided here.

    Raises `UsageError` for what belongs to another run, and for a path that is no whole snapshot.
    """
    if is_named(settings, restarted):
        return find_named(Path(settings.resume), fingerprint)
    if restarted or settings.resume == AUTO:
        return find_newest(settings.folder, fingerprint, say)
    require_unused(settings.folder)
    return None


def is_named(settings: SnapshotSettings, restarted: bool) -> bool:
    """Whether a snapshot is asked for by its name."""
    return not restarted and settings.resume not in (AUTO, NO)


def find_named(folder: Path, fingerprint: Fingerprint) -> SnapshotFile:
    """The snapshot in this folder of one step."""
    step = step_of(folder)
    if step is None or not folder.is_dir():
        raise UsageError(f"--resume {folder}: name a snapshot, FOLDER/step-00000100, or take auto or no")
    found = examine(folder.parent, step, read_contents=True)
    if found.snapshot is None:
        raise UsageError(f"--resume {folder}: it is {found}: take another one")
    check_same_run(found.snapshot, fingerprint)
    return found.snapshot
