"""Paths that are typed, of files and of folders; and what to do where the working folder has been deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click

from playground.runtime import surroundings
from playground.runtime.errors import UsageError

MIN_FREE = 2**20
"""Bytes of free space below which a disk counts as full: more than any table or figure of ours takes."""


def check_writable(flag: str, file: Path) -> None:
    """Raise `UsageError` if `file`, the value of the option `flag`, could not be written now. It stays as it is."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {file}: there is no such folder as {folder}, create it first")
    is_new = not file.exists()
    try:
        if is_new or not file.is_fifo():  # opening a FIFO would wait for its reader
            file.open("ab").close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(f"{flag} {file} cannot be written: {error.strerror}") from None
    if is_new:
        file.unlink(missing_ok=True)
    if free < MIN_FREE:
        raise UsageError(f"{flag} {file}: only {free:,} bytes are free there, make room or choose another disk")


_left: list[str] = []
"""Not empty once a working folder that had been deleted was left."""


def leave_deleted_folder() -> None:
    """Go to the root if the working folder has been deleted. From then on `check_place` refuses relative paths, which
    were meant to start in that folder."""
    if surroundings.leave_deleted_folder():
        _left.append(os.sep)


def check_place(path: str) -> None:
    """Raise `click.BadParameter` for a path that is nowhere: empty, or relative to a folder that has been deleted."""
    if not path:
        raise click.BadParameter("the path is empty.")
    if _left and not os.path.isabs(path):
        raise click.BadParameter(f"{path} is relative to the working folder, which has been deleted: use a full path.")


class FilePath(click.Path):
    """A path, as a `Path`: one that `check_place` lets pass."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        check_place(str(value))
        return super().convert(value, param, ctx)
