"""The lines that ranks run, counted by coverage.py wherever it counts those of their launcher.

Ranks come from a server that coverage.py does not see, and may be ended by a signal before it could save anything. So
the launcher's settings travel with the work, and what a function ran is saved when it returns or raises: in a file of
its own beside the launcher's, as coverage.py has it for several processes. pytest-cov puts the files together; after
`coverage run`, `coverage combine` does. A rank that is killed, or hangs, saves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_NEWS = [
    "already-imported", "module-not-imported", "module-not-measured", "module-not-python", "no-data-collected",
]  # fmt: skip
"""Warnings about what is usual in a rank: it runs one function, and has imported much before."""


def current() -> Any:
    """The `coverage.Coverage` that counts the lines of this process, if any."""
    module = sys.modules.get("coverage")
    return module.Coverage.current() if module else None


def read_settings() -> str:
    """The settings with which coverage.py counts the lines of this process; "" if it does not. Needs coverage 7.10."""
    counting = current()
    return getattr(counting.config, "serialize", str)() if counting else ""


@contextmanager
def count_lines(settings: str) -> Iterator[None]:
    """Count the lines that are run in here with what `read_settings` returned in the launcher, then save the count.

    Where they are counted already (`patch = ["subprocess", "fork"]` in the settings), only save.
    """
    if not settings:
        yield
        return
    running = current()
    counting = running or start(settings)
    try:
        yield
    finally:
        if counting is not running:
            counting.stop()
        counting.save()


def start(settings: str) -> Any:
    from coverage import Coverage

    counting = Coverage(config_file=f":data:{settings}", data_suffix=True, messages=False)
    counting.set_option("run:disable_warnings", NO_NEWS)
    # Both would change this process permanently.
    counting.set_option("run:patch", [])
    counting.set_option("run:sigterm", False)
    kinds = counting.config.concurrency
    counting.set_option("run:concurrency", [kind for kind in kinds if kind != "multiprocessing"])
    counting.start()
    return counting
