"""Paths that are typed, of files and of folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

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


class FilePath(click.Path):
    """A path, as a `Path`. Refuses the empty one."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            raise click.BadParameter("the path is empty.")
        return super().convert(value, param, ctx)
