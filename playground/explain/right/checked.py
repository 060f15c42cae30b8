"""A function whose training is checked, as it is sent to a rank: with little to import there. Does
not import torch: the ranks do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.base.remote import remote
from playground.explain.starts import folder_of_this_start
from playground.world.rank.assignment import call

OBSERVED = remote("playground.explain.right.observer:checked")
NEEDED = OBSERVED.module, __name__
"""What ranks import for it."""


@dataclass(frozen=True)
class Checked:
    """Calls `fn`, and writes what it does into `folder`."""

    fn: Callable[..., Any]
    folder: Path

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with OBSERVED(folder_of_this_start(self.folder), rank):
            return call(self.fn, rank, size, *args)

    def __repr__(self) -> str:
        return repr(self.fn)  # in messages
