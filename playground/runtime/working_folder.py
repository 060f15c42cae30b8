"""The working folder, which may have been deleted: then the system does not tell where it was."""

from __future__ import annotations

import os


def working_folder() -> str | None:
    """Its path; None if it has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


def leave_deleted_folder() -> bool:
    """Go to the root if the working folder has been deleted, and say whether: in such a folder oneMKL ends whoever
    imports torch."""
    deleted = working_folder() is None
    if deleted:
        os.chdir(os.sep)
    return deleted
