"""Recordings of whole runs, in the process that starts the ranks. Does not import torch: the ranks do."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from playground.runtime.environment import restart_count
from playground.runtime.launch import launch
from playground.runtime.remote import remote
from playground.runtime.temporary_folder import temporary_folder
from playground.runtime.work import call
from playground.see.record import SCHEMA, Recording
from playground.see.record.layout import TABLES, Members, read_folder, write_file
from playground.see.record.merge import TEXT, merge, read_tables, refused_if_damaged

RECORD = remote("playground.see.record.rank:recorded")


@dataclass(frozen=True)
class Recorded:
    """Calls `fn`, and records the rank meanwhile into a folder in `folder` whose name is the number of restarts of the
    world. Rank 0 writes `run` there, the content of run.json."""

    fn: Callable[..., Any]
    folder: Path
    run: str = ""

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with RECORD(self.folder / str(restart_count()), rank, size, "" if rank else self.run):
            return call(self.fn, rank, size, *args)


MAX_TEXT = 2**18
"""Size in bytes above which a file is not taken for a program."""


def record_run(
    fn: Callable[..., Any], size: int, *args: Any, backend: str = "gloo", command: Sequence[str] = ()
) -> tuple[list[Any], Recording]:
    """Run `fn(rank, size, *args)` on `size` ranks. Returns their results, and the recording of the run.

    Raises what `launch` raises.
    """
    with temporary_folder("recording") as folder:
        recorded = Recorded(fn, folder, describe_run(command, backend, size))
        results = launch(recorded, size, backend=backend, args=args)
        return results, merge(collect(folder / "0"))


def describe_run(command: Sequence[str], backend: str, size: int) -> str:
    """The description of a run before it begins: the content of run.json."""
    versions = {
        **{name: version(name) for name in ("playground", "torch")},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    run = {"schema": SCHEMA, "command": list(command), "backend": backend, "size": size, "versions": versions}
    return json.dumps(run)


def collect(folder: Path) -> Members:
    """The ranks' files in their folder, together with the program's files that they refer to. Raises `UsageError` for
    what no rank writes."""
    members = read_folder(folder)
    paths: dict[str, Path] = {}
    with refused_if_damaged(folder):
        for name in members.files:
            if name.endswith(TABLES):
                paths |= {source.file: Path(path) for source, path in read_tables(members.files[name]).sources}
    texts = {
        f"{TEXT}{file}": path.read_bytes()
        for file, path in sorted(paths.items())
        if path.is_file() and path.stat().st_size <= MAX_TEXT
    }
    return Members({**members.files, **texts})


def pack(folder: Path, file: Path) -> Recording:
    """Make one file of the ranks' files in their folder. Returns the recording."""
    members = collect(folder)
    write_file(file, members)
    return merge(members, folder)
