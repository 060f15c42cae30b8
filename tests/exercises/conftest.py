"""Modules that take long to import: the server of ranks has to know them before the first rank
starts."""

from __future__ import annotations

import pytest

from playground.exercises.exercise import Exercise
from playground.world.launcher.fork_client import preload


@pytest.hookimpl(trylast=True)  # once those that are not to be run have been left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        exercise = item.callspec.params.get("exercise") if hasattr(item, "callspec") else None
        if isinstance(exercise, Exercise):
            preload(*exercise.preload)
