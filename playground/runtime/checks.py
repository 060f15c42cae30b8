"""What settings check when they are made: one way to ask, and one form of words. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection

from playground.runtime.errors import UsageError


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}")


def check_at_least_one(settings: object, *names: str) -> None:
    """Raise `UsageError` unless each of these attributes of `settings` is 1 or more."""
    for name in names:
        if getattr(settings, name) < 1:
            raise UsageError(f"{name} {getattr(settings, name)}: it must be at least 1")


def check_not_negative(settings: object, *names: str) -> None:
    """Raise `UsageError` unless each of these attributes of `settings` is a finite number, 0 or above."""
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:
            raise UsageError(f"{name} {getattr(settings, name)}: it must be a finite number, 0 or above")
