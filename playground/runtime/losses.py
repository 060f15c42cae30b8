"""Expendable ranks: one that dies is lost, and the others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from playground.runtime.errors import RankFailed, UsageError

OnLoss = Callable[[RankFailed], None]
"""Takes the end of an expendable rank, without which the others go on."""


def log_loss(failure: RankFailed) -> None:
    """Say in one line who is lost: on stderr, unless the program has set up logging otherwise."""
    logging.getLogger("playground").warning(describe_loss(failure))


def describe_loss(failure: RankFailed) -> str:
    """Who is lost, and how."""
    return f"{failure.headline}; the others go on"


def check_expendable(ranks: Collection[int], size: int) -> None:
    """Raise `UsageError` for expendable ranks that cannot be."""
    for rank in ranks:
        if not 1 <= rank < size:
            raise UsageError(
                f"expendable rank {rank} of {size}: use ranks 1 to {size - 1}; at rank 0 is the store where all meet"
            )
