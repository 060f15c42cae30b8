"""RESUMABLE: a file among the snapshots of a run that was asked to end, and is to go on later. Does not import torch.

Job managers that cannot see the exit code, behind torchrun say, look for it; people read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from playground.survival.disk import replace, sync_folder

NAME = "RESUMABLE"


def write_marker(folder: Path, about: Mapping[str, object]) -> Path:
    """Write the file, a line `name: value` for each of `about`. Returns its path; raises `OSError`."""
    file = folder / NAME
    lines = "".join(f"{name}: {value}\n" for name, value in about.items())
    replace(file, lines.encode("utf-8", "surrogateescape"), memoryview(b""))
    sync_folder(folder)
    return file


def remove_marker(folder: Path) -> None:
    """The run goes on, or another one begins: it is true no longer. Any number of ranks may call this."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
