"""Files that survive a power failure, and that cost little: one is written over a file that is no longer needed.

Writing a new file, and removing an old one, takes three times as much of a core's time: blocks have to be found, names
entered, and all that goes through the file system's journal. Every call that changes the disk is one of `os`. Does not
import torch.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.files import NO_LINK, belongs_to_another

SPARE = ".spare"
"""A folder that is no longer needed, kept for reuse."""
REMOVED = ".removed-"
"""Prefix of the names of folders that are being removed."""


def overwrite(file: Path, head: bytes, body: memoryview) -> bool:
    """Make `head` and `body` the contents of `file`, and force them to the disk. Returns whether its name may not
    lie on the disk yet: if it was empty or new.

    The head is written last: after a process was killed in the midst, it is the old one. After a power failure any of
    it may be new; only a checksum tells. Raises `OSError` (for a symbolic link, too), and then leaves an empty file.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | NO_LINK, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        if before > len(head) + len(body):
            os.ftruncate(descriptor, len(head) + len(body))
        write_at(descriptor, len(head), body)
        write_at(descriptor, 0, memoryview(head))
        getattr(os, "fdatasync", os.fsync)(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        raise
    finally:
        os.close(descriptor)
    return before == 0


def replace(file: Path, head: bytes, body: memoryview) -> bool:
    """As `overwrite`, for a file that is still needed: under its name there is the old content or, whole, the new."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        overwrite(unfinished, head, body)
        os.rename(unfinished, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return True


def write_at(descriptor: int, position: int, view: memoryview) -> None:
    """Write all of it; the system may take less at a time."""
    os.lseek(descriptor, position, os.SEEK_SET)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Force the names in `folder` to the disk, where the system can do that (Windows cannot)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make the folder of a run's snapshots. Raises `UsageError` where it cannot be made or written to, and for one in
    which others can put links: it is another user's, or made for all to write to (/tmp itself)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            is_shared = belongs_to_another(folder, own=os.fstat(file.fileno()).st_uid)
        is_shared = is_shared or bool(folder.stat().st_mode & stat.S_ISVTX)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"snapshots in {folder}: {why}; choose a folder that can be written to") from None
    if is_shared:
        why = "other users can put links there, which would lead to your files"
        raise UsageError(f"snapshots in {folder}: {why}; choose a folder of your own")


def make_subfolder(folder: Path) -> None:
    """Make `folder`, which another rank may have made already, of the spare one if there is any."""
    try:
        os.rename(folder.parent / SPARE, folder)
    except OSError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)


def spare_folder(folder: Path) -> None:
    """Keep this folder for `make_subfolder`; remove it if there is a spare one."""
    try:
        os.rename(folder, folder.with_name(SPARE))
    except OSError:
        remove_folders(folder.parent, [folder.name])


def remove_folders(folder: Path, names: Iterable[str]) -> None:
    """Remove folders of files from `folder`, each at once or not at all, whatever happens; and what is left of those
    that a run before had no time for. Other ranks may be doing the same. Of a link, the link alone is removed."""
    for name in names:
        with contextlib.suppress(OSError):
            os.rename(folder / name, folder / f"{REMOVED}{name}")
    for doomed in folder.glob(f"{REMOVED}*"):
        with contextlib.suppress(OSError):  # another rank was faster, or it is not ours to delete
            if doomed.is_symlink():
                os.unlink(doomed)
                continue
            for file in doomed.iterdir():
                os.unlink(file)
            os.rmdir(doomed)
