"""The folder of a run's snapshots: files that are whole or absent, when they are taken, and the
lock by which it belongs to one run.

    step-00000120-9f86d081884c7d65.pt    the state of all ranks after 120 steps, and the first
                                         digits of its SHA-256

Every call that changes the disk is one of `os`. Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.files import NO_LINK, belongs_to_another, replacing
from playground.runtime.flags import check_at_least_one


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """Raises `UsageError` for a number of steps below 1."""

    folder: Path
    """Seen by all ranks, on whatever host they are."""
    every: int = 100
    """Steps of the optimizer between two snapshots."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "every")


KEPT = 3
"""Number of snapshots kept, the newest ones: if one turns out to be damaged, there is one before
it."""
NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")


def find_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """The step and file of each snapshot in `folder`, the newest first."""
    names = map(NAME.fullmatch, os.listdir(folder) if folder.is_dir() else ())
    return sorted(((int(name[1]), folder / name[0]) for name in names if name), reverse=True)


def name_file(step: int, content: bytes) -> str:
    return f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"


def make_folder(folder: Path) -> None:
    """Make the folder of a run's snapshots. Raises `UsageError` where it cannot be made or written
    to, and for one in which others can put links: it is another user's, or made for all to write to
    (/tmp itself)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            own = os.fstat(file.fileno()).st_uid
        is_public = belongs_to_another(folder, own) or folder.stat().st_mode & stat.S_ISVTX
    except OSError as error:
        raise UsageError(
            f"snapshots in {folder}: {error.strerror}; choose a folder that can be written to"
        ) from None
    if is_public:
        raise UsageError(
            f"snapshots in {folder}: other users can put links there; choose a folder of your own"
        )


def write_snapshot(folder: Path, step: int, content: bytes) -> None:
    """Write the snapshot, as `write` does on the board of elastic, then remove all but the `KEPT`
    newest up to it. (A run that was sent back takes later ones again.) The name is on the disk
    before an older one is removed: after a kill or a power failure the snapshot is whole or absent,
    and those before it are there. Raises `OSError`."""
    with replacing(folder / name_file(step, content), ".unfinished", durable=True) as descriptor:
        left = memoryview(content)
        while left:  # the system may take less at a time
            left = left[os.write(descriptor, left) :]
    for _, file in [each for each in find_snapshots(folder) if each[0] <= step][KEPT:]:
        with contextlib.suppress(OSError):
            os.unlink(file)


def lock_folder(folder: Path) -> int:
    """Take `folder` for this process, until it ends or closes the descriptor returned. Raises
    `UsageError` if another process holds it. (A POSIX lock: unlike with `flock`, processes that are
    forked do not hold it on.)"""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    except OSError as error:
        raise UsageError(
            f"snapshots in {folder}: .lock: {error.strerror}; choose another folder"
        ) from None
    for _ in range(50):  # 1 s, for the kernel has to release the lock of a process that was killed
        if not is_locked(descriptor):
            return descriptor
        time.sleep(0.02)
    os.close(descriptor)
    todo = "wait for its end, or choose another folder"
    raise UsageError(f"snapshots in {folder}: another run is writing its own there; {todo}")


def is_locked(descriptor: int) -> bool:
    """Whether another process holds the lock; if none does, this one from now on, if the file
    system has locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
