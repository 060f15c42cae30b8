"""Training on every rank of a world."""

from __future__ import annotations

import os
from typing import Any

from playground.runtime import host
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.remote import Remote
from playground.training.prepare import MIRROR, default_data_dir, prepare
from playground.training.settings import TrainingSettings


def run_training(rank: int, size: int, lesson: Remote, settings: Any, more: tuple[Any, ...] = ()) -> Any:
    """The result of `lesson(rank, size, settings, *more)`. Ranks agree on their settings, and each keeps to its place.
    Raises `UsageError` if the ranks were not all given the same settings."""
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    return lesson(rank, size, settings, *more)


def default_settings() -> TrainingSettings:
    """The defaults, with the data that is there or can be had: for `run(rank, size)` in a program of its own."""
    source = prepare("auto", default_data_dir(), os.environ.get(MIRROR))
    return TrainingSettings(folder=source.folder, dataset=source.name)
