"""Paths that are typed, of files and of folders; and what to do where the working folder has been deleted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from playground.runtime import working_folder

_left: list[str] = []
"""Not empty once a working folder that had been deleted was left."""


def leave_deleted_folder() -> None:
    """Go to the root if the working folder has been deleted. From then on `check_place` refuses relative paths, which
    were meant to start in that folder."""
    if working_folder.leave_deleted_folder():
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
