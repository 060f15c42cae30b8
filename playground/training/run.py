"""Training on every rank of a world."""

from __future__ import annotations

from typing import Any

from playground.runtime import host
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.runtime.remote import Remote


def run_training(rank: int, size: int, lesson: Remote, settings: Any, more: tuple[Any, ...] = ()) -> Any:
    """What `lesson(rank, size, settings, *more)` returns. Ranks agree on their settings, and each keeps to its place.
    Raises `UsageError` if the ranks were not all given the same settings."""
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    return lesson(rank, size, settings, *more)
