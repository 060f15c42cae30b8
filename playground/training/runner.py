"""Training on every rank of a world: the ranks agree on their settings, and each has its place."""

from __future__ import annotations

from typing import Any, Protocol

from playground.runtime import host
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.remote import Remote
from playground.training.loader import explain_lost_worker


class Settings(Protocol):
    """The settings of a training run."""

    def on_all_ranks(self) -> dict[str, object]:
        """The settings that must be the same on every rank."""


def run_training(rank: int, size: int, lesson: Remote, settings: Settings, more: tuple[Any, ...] = ()) -> Any:
    """What `lesson(rank, size, settings, *more)` returns.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    with explain_lost_worker(rank, size):
        return lesson(rank, size, settings, *more)
