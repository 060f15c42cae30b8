"""Files that survive a power failure: written under another name, forced to the disk, then renamed.

Every call that changes the disk is one of `os`. Does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, cast

from playground.runtime.errors import UsageError

BUFFER = 2**20
"""Bytes that are collected before they are written."""
REMOVED = ".removed-"
"""What the names of folders begin with that are being removed."""


class ChecksumWriter(io.RawIOBase):
    """A stream into a file, and the checksum of what went through.

    Its `write` never raises, because torch's writer of zip files may turn that into a `RuntimeError` about positions in
    the file; what the system answered is raised by `finish`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.nbytes, self.digest = descriptor, 0, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, block: object) -> int:
        view = memoryview(cast(bytes, block)).cast("B")
        if self.error is None:
            self.digest.update(view)
            self.nbytes += len(view)
            try:
                write_all(self.descriptor, view)
            except OSError as error:
                self.error = error
        return len(view)

    def finish(self) -> None:
        """Force what was written to the disk. Raises `OSError` if it, or a write before, failed."""
        if self.error:
            raise self.error
        os.fsync(self.descriptor)


def write_all(descriptor: int, view: memoryview) -> None:
    """Write all of it; the system may take less at a time."""
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomically(file: Path, write: Callable[[BinaryIO], object]) -> ChecksumWriter:
    """Have `write` fill a stream that becomes `file`: under that name there is the old content or, whole, the new.

    The name itself lies on the disk only after `sync_folder(file.parent)`. Raises `OSError`, and then leaves nothing.
    """
    unfinished = file.with_name(f".{file.name}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            writer = ChecksumWriter(descriptor)
            stream = io.BufferedWriter(writer, BUFFER)
            write(cast(BinaryIO, stream))
            stream.flush()
            writer.finish()
        finally:
            os.close(descriptor)
        os.rename(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return writer


def sync_folder(folder: Path) -> None:
    """Force the names in `folder` to the disk, where the system can do that (Windows cannot)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make the folder of a run's snapshots. Raises `UsageError` where it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"snapshots in {folder}: {why}; choose a folder that can be written to") from None


def make_subfolder(folder: Path) -> None:
    """Make `folder`, which another rank may have made already, and force its name to the disk."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(folder.parent)


def remove_folders(folder: Path, names: Iterable[str]) -> None:
    """Remove folders of files from `folder`, each at once or not at all, whatever happens; and what is left of those
    that a run before had no time for. Other ranks may be doing the same."""
    for name in names:
        with contextlib.suppress(OSError):
            os.rename(folder / name, folder / f"{REMOVED}{name}")
    for doomed in folder.glob(f"{REMOVED}*"):
        with contextlib.suppress(OSError):  # another rank was faster, or it is not ours to delete
            for file in doomed.iterdir():
                os.unlink(file)
            os.rmdir(doomed)
