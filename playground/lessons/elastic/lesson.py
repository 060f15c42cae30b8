"""Training goes on after failures: ranks are killed, all start anew, and the end has the same bits.

    python -m playground elastic
    python -m playground elastic --kills 10 --seed 7 --way ddp

The same training runs twice: once undisturbed, and once with ranks that are killed. Both take snapshots. When a rank is
gone, the others cannot go on: the launcher ends them, starts as many new ones, and these go on from the newest snapshot
that is whole. What they run is playground/training/loop.py, as sgd and ddp do with --snapshots. What a snapshot holds:
playground/training/resumable.py.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html, for the idea that all ranks start anew
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

from playground.lessons.elastic.settings import Kill
from playground.runtime import report, restart_count
from playground.training.loop import prepare_and_train, sync_by_hand, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync


def by_hand(rank: int, size: int, settings: TrainingSettings, kills: Sequence[Kill]) -> TrainingResult:
    """Train as the lesson sgd does. Each time the world is started, the next of `kills` happens."""
    return prepare_and_train(settings, lambda model, settings: Mortal(sync_by_hand(model, settings), rank, kills))


def with_ddp(rank: int, size: int, settings: TrainingSettings, kills: Sequence[Kill]) -> TrainingResult:
    """Train as the lesson ddp does. Each time the world is started, the next of `kills` happens."""
    return prepare_and_train(settings, lambda model, settings: Mortal(sync_with_ddp(model, settings), rank, kills))


class Mortal(GradSync):
    """Does what `sync` does, until its rank is killed. Nothing warns the rank, and nothing is tidied up."""

    def __init__(self, sync: GradSync, rank: int, kills: Sequence[Kill]) -> None:
        super().__init__(sync.model)
        self.sync, self.rank, self.steps, self.is_back = sync, rank, 0, False
        self.next_kill = kills[restart_count()] if restart_count() < len(kills) else None

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.sync.no_sync()

    def after_backward(self) -> None:
        self.sync.after_backward()

    def go_on_from(self, step: int) -> None:
        self.sync.go_on_from(step)
        self.steps = step

    @property
    def keeps_replicas_equal(self) -> bool:
        return self.sync.keeps_replicas_equal

    def after_step(self, last: bool) -> None:
        self.sync.after_step(last)
        self.steps += 1
        if not self.is_back:
            self.is_back = True
            report(stepped=self.steps)
        if self.next_kill == Kill(self.rank, self.steps):
            report(killed=self.steps)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("elastic")
