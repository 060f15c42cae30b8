"""A run that is recorded: around the function of its ranks, how it is described, how it failed, and
what its ranks have written. Does not import torch: the ranks do."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from playground.base.errors import PlaygroundError
from playground.base.files import LARGEST_PROGRAM
from playground.base.remote import remote
from playground.explain.hang.wording import Diagnosis
from playground.explain.replay.record import layout
from playground.explain.replay.record.layout import TEXT, Files
from playground.explain.replay.record.reading import read_tables, refused_if_damaged
from playground.explain.replay.record.recording import SCHEMA, Standstill
from playground.explain.starts import folder_of_this_start
from playground.world.rank.assignment import call

RECORDED = remote("playground.explain.replay.record.rank:recorded")


@dataclass(frozen=True)
class Recorded:
    """Calls `fn`, and records the rank meanwhile into a folder in `folder` whose name is the number
    of restarts of the world. Rank 0 writes `run` there, the content of run.json."""

    fn: Callable[..., Any]
    folder: Path
    run: str = ""

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with RECORDED(folder_of_this_start(self.folder), rank, "" if rank else self.run):
            return call(self.fn, rank, size, *args)


def describe_run(command: Sequence[str], backend: str, size: int) -> str:
    """The description of a run before it begins: the content of run.json."""
    run = {
        "schema": SCHEMA,
        "command": list(command),
        "backend": backend,
        "size": size,
        "versions": find_versions(),
    }
    return json.dumps(run)


def find_versions() -> dict[str, str]:
    """The versions of what runs here."""
    return {
        "playground": version("playground"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def standstill_of(diagnosis: Diagnosis | None) -> Standstill | None:
    """What a recording keeps of a diagnosis, if there is one."""
    if diagnosis is None:
        return None
    before = f"; before that: {diagnosis.difference}" if diagnosis.difference else ""
    raised = f"{diagnosis.raised}; " if diagnosis.raised else ""
    sentence = " ".join(f"{raised}{diagnosis.sentence}{before}".split())
    return Standstill(sentence, diagnosis.cure, diagnosis.waits)


def note_failure(folder: Path, failure: PlaygroundError, run: str, where: str = "") -> None:
    """Add how a run failed, at which line, if that is known, and its diagnosis, if it has one, to
    its description `run`, in this folder."""
    diagnosis = failure.diagnosis
    line = f" ({where})" if where else ""
    told = {**json.loads(run), "ended": str(diagnosis or f"{failure.headline}{line}")}
    if standstill := standstill_of(diagnosis):
        told["standstill"] = standstill
    (folder / layout.RUN).write_text(json.dumps(told))


def collect(folder: Path) -> Files:
    """The ranks' files, with the program's files that they refer to. Raises `UsageError` for
    damaged ones."""
    files = layout.read_folder(folder)
    with refused_if_damaged(folder):
        ranks = [
            read_tables(content) for name, content in files.items() if name.endswith(layout.TABLES)
        ]
    paths = {source.file: Path(path) for rank in ranks for source, path in rank[layout.SOURCE]}
    there = ((file, path) for file, path in sorted(paths.items()) if path.is_file())
    texts = {
        f"{TEXT}{file}": path.read_bytes()
        for file, path in there
        if path.stat().st_size <= LARGEST_PROGRAM
    }
    return {**files, **texts}
