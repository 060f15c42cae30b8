"""Paths that are typed."""

from __future__ import annotations

from pathlib import Path

import click

from playground.runtime.errors import UsageError

FILE = click.Path(path_type=Path)


def check_writable(flag: str, file: Path) -> None:
    """Raise `UsageError` if `file`, the value of the option `flag`, could not be written now. It stays as it is."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {file}: there is no such folder as {folder}, create it first")
    is_new = not file.exists()
    try:
        if is_new or not file.is_fifo():  # opening a FIFO would wait for its reader
            file.open("ab").close()
    except OSError as error:
        raise UsageError(f"{flag} {file} cannot be written: {error.strerror}") from None
    if is_new:
        file.unlink(missing_ok=True)
