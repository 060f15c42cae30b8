"""The guard of a solution: it leaves nothing behind that the next one would pay for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from playground.exercises import guard


def stop(words: str, line: int) -> NoReturn:
    raise AssertionError(words)


def test_many_guards_add_one_audit_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python keeps each, and calls it at every event: a world that is kept judges many
    solutions."""
    added: list[Any] = []
    monkeypatch.setattr(sys, "addaudithook", added.append)
    guard.hear_events.cache_clear()
    try:
        for _ in range(3):
            with guard.Guard(SimpleNamespace(file="", running=False), stop).watching():
                pass
    finally:
        guard.hear_events.cache_clear()
    assert len(added) == 1
    assert guard._watching == []
