"""Training by the general loop, whose ranks are killed after given steps."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

from playground.lessons.elastic.page import Kill
from playground.runtime import restart_count
from playground.training.loop import prepare_and_train, sync_by_hand, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync


def by_hand(rank: int, size: int, settings: TrainingSettings, kills: Sequence[Kill]) -> TrainingResult:
    """Train as sgd does. Each time the world is started, the next of `kills` happens."""
    return prepare_and_train(settings, lambda model, settings: Mortal(sync_by_hand(model, settings), rank, kills))


def with_ddp(rank: int, size: int, settings: TrainingSettings, kills: Sequence[Kill]) -> TrainingResult:
    """Train as ddp does. Each time the world is started, the next of `kills` happens."""
    return prepare_and_train(settings, lambda model, settings: Mortal(sync_with_ddp(model, settings), rank, kills))


class CountedSteps(GradSync):
    """Does what `sync` does, and counts the steps."""

    def __init__(self, sync: GradSync) -> None:
        super().__init__(sync.model)
        self.sync, self.steps, self.keeps_replicas_equal = sync, 0, sync.keeps_replicas_equal

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.sync.no_sync()

    def after_backward(self) -> None:
        self.sync.after_backward()

    def go_on_from(self, step: int) -> None:
        self.sync.go_on_from(step)
        self.steps = step

    def after_step(self, last: bool) -> None:
        self.sync.after_step(last)
        self.steps += 1


class Mortal(CountedSteps):
    """Does what `sync` does, until its rank is killed. Nothing warns the rank, and nothing is tidied up."""

    def __init__(self, sync: GradSync, rank: int, kills: Sequence[Kill]) -> None:
        super().__init__(sync)
        self.rank = rank
        self.next_kill = kills[restart_count()] if restart_count() < len(kills) else None

    def after_step(self, last: bool) -> None:
        super().after_step(last)
        if self.next_kill == (self.rank, self.steps):
            os.kill(os.getpid(), signal.SIGKILL)
