"""A launcher that looks at the ranks all the time, so that a wrong proof of a deadlock cannot be
missed for want of a look."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from playground.world.launcher import examiner, watch
from playground.world.launcher.examiner import Examiner

PAUSE = 0.001
"""Seconds between two looks, in place of a quarter of a second, and between the two that ranks are
asked for."""


@dataclass
class Looks:
    """How often the launcher has looked."""

    looks: int = 0
    suspicions: int = 0
    """Looks that would have proved a deadlock if nothing but main threads acted: the ranks were
    asked."""
    blind: int = 0
    """Looks at ranks of which one, or more, was in doubt."""


@contextlib.contextmanager
def eager() -> Iterator[Looks]:
    """In this block, launchers of this process look all the time."""
    count, real = Looks(), Examiner.find_deadlock

    def look(examiner: Examiner) -> Any:
        due, found = not examiner.seconds_left, real(examiner)
        count.looks += due
        count.suspicions += found is not None
        return found

    with (
        patch.object(examiner, "INTERVAL", PAUSE),
        patch.object(watch, "BETWEEN_LOOKS", PAUSE),
        patch.object(Examiner, "find_deadlock", look),
    ):
        yield count
