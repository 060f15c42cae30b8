"""Modules that take long to import: the server of ranks has to know them before the first rank
starts."""

from __future__ import annotations

import pytest

from playground.exercises.exercise import Exercise
from playground.world.launcher.fork_client import preload


def exercise_of(item: pytest.Item) -> Exercise | None:
    """The exercise that a test is about."""
    found = item.callspec.params.get("exercise") if hasattr(item, "callspec") else None
    return found if isinstance(found, Exercise) else None


@pytest.hookimpl(tryfirst=True)  # before those that need a GPU are left out
def pytest_itemcollected(item: pytest.Item) -> None:
    exercise = exercise_of(item)
    if exercise and exercise.gpus:
        item.add_marker("gpu")


@pytest.hookimpl(trylast=True)  # once those that are not to be run have been left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if exercise := exercise_of(item):
            preload(*exercise.preload)
