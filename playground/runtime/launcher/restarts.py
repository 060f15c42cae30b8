"""Restarts: the work of a world that failed is given to a new one, a limited number of times.

Source: torchrun's --max-restarts, https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from playground.runtime.errors import PlaygroundError, Preempted, UsageError
from playground.runtime.rank.work import Work

OnRestart = Callable[[PlaygroundError, int], None]
"""Takes (failure, count): why a world failed, and how many restarts there have been, the coming one included."""
RESTART = "; restart "
"""Stands in the line that tells of a restart, after the failure and before the count."""


def run_with_restarts(run: Callable[[Work], list[Any]], work: Work, restarts: int, on_restart: OnRestart) -> list[Any]:
    """What `run(work)` returns, called again after each failure: `restarts` times at most, then the failure is raised.

    The work tells the ranks which restart it belongs to. A `UsageError` is raised at once, since no restart changes it,
    and so is `Preempted`.
    """
    for count in range(restarts):
        try:
            return run(replace(work, restart_count=count))
        except (UsageError, Preempted):
            raise
        except PlaygroundError as error:
            failure = error
        on_restart(failure, count + 1)
    return run(replace(work, restart_count=restarts))


def log_restart(failure: PlaygroundError, count: int) -> None:
    """Say in one line why there is a restart: on stderr, unless the program has set up logging otherwise."""
    logging.getLogger("playground").warning(describe_restart(failure, count))


def describe_restart(failure: PlaygroundError, count: int) -> str:
    """Why there is a restart, and which one it is."""
    return f"{failure.headline}{RESTART}{count}"


def check_restarts(restarts: int, joined: bool = False) -> None:
    """Raise `UsageError` for a number of restarts that cannot be. `joined`: others have started the ranks."""
    if restarts < 0:
        raise UsageError(f"{restarts} restarts: use a whole number, 0 or more")
    if joined and restarts > 0:
        raise UsageError(
            f"{restarts} restarts of a world that was started elsewhere: whoever starts the ranks restarts them, "
            f"with torchrun: --max-restarts {restarts}"
        )
