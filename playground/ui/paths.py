"""Files that are to be written."""

from __future__ import annotations

import os
from pathlib import Path

from playground.base.errors import UsageError
from playground.base.files import NO_LINK, follow_own_links


def check_writable(flag: str, file: Path) -> None:
    """Raise `UsageError` if `file`, the value of the option `flag`, could not be written now. It
    stays as it is."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{flag} {file}: there is no such folder as {folder}, create it first")
    try:
        target = follow_own_links(file)
        is_new = not target.exists()
        if is_new or not target.is_fifo():  # opening a FIFO would wait for its reader
            os.close(os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666))
    except OSError as error:
        raise UsageError(f"{flag} {file} cannot be written: {error.strerror}") from None
    if is_new:
        target.unlink(missing_ok=True)
