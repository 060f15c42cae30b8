"""Tells of silent mistakes while the ranks run. Does not import torch.

What ranks have written so far is what they would leave if they were killed now, and is judged so: a
rule is certain of it only if it would be certain of ranks that were killed. Rules that a later step
may answer wait for the end.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

import click

from playground.base.threads import OurThread
from playground.explain.right.finding import Finding
from playground.explain.right.log import file_name
from playground.explain.right.reading import count_written, read_ranks
from playground.explain.right.report import tell_all
from playground.explain.right.rules import TOLD_AT_THE_END, find_mistakes
from playground.explain.starts import folder_of_last_start

INTERVAL = 0.5
"""Seconds between two looks at the ranks' logs."""
SHARE, SHARE_IN_A_RANK = 0.02, 0.005
"""The largest part of the time that is spent in looking; in a rank, whose program waits for it."""
RECENT = 10.0
"""Seconds for which what was told needs no repetition."""


class EarlyTeller:
    """In its block, each certain finding is told once, on stderr, as soon as it is certain."""

    def __init__(self, folder: Path, size: int, share: float = SHARE) -> None:
        """`folder`: where the ranks of each start leave their logs; `share`: the largest part of
        the time that is spent in looking."""
        self.folder = folder
        self.size = size
        self.share = share
        self.told: dict[tuple[str, tuple[int, ...]], float] = {}
        """When what was told, by its rule and ranks."""
        self.written: list[int] = []
        """How much the ranks had written when they were last looked at."""
        self.is_over = threading.Event()
        self.thread = OurThread(self.look_again_and_again, name="check", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self.is_over.set()
        self.thread.join()

    def look_again_and_again(self) -> None:
        pause = INTERVAL
        while not self.is_over.wait(pause):
            began = time.monotonic()
            try:
                self.look()
            except Exception:  # what a rule does not expect is told at the end
                return
            pause = max(INTERVAL, (time.monotonic() - began) / self.share)

    def look(self) -> None:
        folder = folder_of_last_start(self.folder)
        written = [count_written(folder / file_name(rank)) for rank in range(self.size)]
        if written == self.written:
            return
        self.written = written
        new = [
            found
            for found in find_mistakes(read_ranks(folder, self.size))
            if found.is_certain
            and found.rule not in TOLD_AT_THE_END
            and (found.rule, found.ranks) not in self.told
        ]
        if new and not self.is_over.is_set():
            self.told |= {(found.rule, found.ranks): time.monotonic() for found in new}
            click.echo(tell_all(new), err=True)

    def is_told(self, found: Finding) -> bool:
        """Whether this was told, a moment ago or before."""
        return (found.rule, found.ranks) in self.told

    def is_recent(self, found: Finding) -> bool:
        """Whether this was told a moment ago."""
        told = self.told.get((found.rule, found.ranks))
        return told is not None and time.monotonic() - told < RECENT
