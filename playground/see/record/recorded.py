"""A function such that the ranks that run it record what they do. Does not import torch: the ranks do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.runtime.environment import restart_count
from playground.runtime.remote import remote
from playground.runtime.work import call

RECORD = remote("playground.see.record.rank:recorded")


@dataclass(frozen=True)
class Recorded:
    """Calls `fn`; what the rank does meanwhile is written into a folder in `folder`, whose name is the number of times
    that the world has been started anew. Rank 0 writes `run` there, the content of run.json."""

    fn: Callable[..., Any]
    folder: Path
    run: str = ""

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with RECORD(self.folder / str(restart_count()), rank, size, "" if rank else self.run):
            return call(self.fn, rank, size, *args)
