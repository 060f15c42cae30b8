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
        with contextlib.suppress(OSError):  # its process is alive, or another one was faster
            if left.lstat().st_uid == os.geteuid():
                os.close(lock(left))
                shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    descriptor = -1
    try:
        with contextlib.suppress(OSError):  # there are no locks
            descriptor = lock(folder / "new", os.O_CREAT)
            os.rename(folder / "new", folder / MARK)  # from now on another process may look at the lock
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def lock(file: Path, flags: int = 0) -> int:
    """A descriptor that holds the lock of this file. Raises `OSError` if another process has it, or for a link."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_empty_cache() -> None:
    """Remove the folder that torch makes for compiled code as soon as its compiler is imported (optimizers do that), if
    it is empty and where torch puts it by default. Later compilations make it again."""
    with contextlib.suppress(OSError, KeyError, ImportError):  # the user has no name
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.rmdir(os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"))
