"""Temporary folders. One whose process was killed stays until the next is made, and no longer; nor does torch's."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "playground-"
MARK = ".temporary"
"""The file that tells such a folder from others, and that its process holds a lock of. The kernel lets go of it."""


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A new folder, removed at the end of the block. Those of processes that were killed are removed before."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        with contextlib.suppress(OSError):  # another process was faster, or there are no locks
            remove_if_free(left)
    folder, descriptor = make_folder(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def make_folder(purpose: str) -> tuple[Path, int]:
    """A new folder, and what holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        descriptor = os.open(folder / MARK, os.O_RDWR | os.O_CREAT)
        try:
            is_ours = lock(descriptor, folder / MARK)
        except OSError:
            is_ours = True
        if is_ours:
            return folder, descriptor
        os.close(descriptor)  # another process has taken the folder for one that was left


def remove_if_free(mark: Path) -> None:
    """Remove the folder of this mark, unless a process holds its lock. Raises `OSError`."""
    if mark.lstat().st_uid != os.geteuid():
        return
    descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if lock(descriptor, mark):
            shutil.rmtree(mark.parent, ignore_errors=True)
    finally:
        os.close(descriptor)


def lock(descriptor: int, mark: Path) -> bool:
    """Whether this process now holds the lock, and the mark is still there. Raises `OSError` where there are none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), mark.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def remove_empty_cache() -> None:
    """Remove the folder that torch makes for compiled code as soon as its compiler is imported (optimizers do that), if
    it is empty and where torch puts it by default. Later compilations make it again."""
    with contextlib.suppress(OSError, KeyError, ImportError):  # the user has no name
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.rmdir(os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"))
