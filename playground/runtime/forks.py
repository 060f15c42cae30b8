"""Resources that belong to one process, and must not live on in processes forked from it.

A child that `os.fork` makes, or multiprocessing with its method "fork", has copies of all
descriptors. With a copy of the launcher's it would keep ranks alive whose launcher is gone, and
with a copy of a rank's it would speak as the rank.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

_own: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(*things: Any) -> None:
    """In each process that is forked from this one, close these things, if they still exist."""
    _own.update(things)


def leave_behind() -> None:
    """In a forked process: let go of what is its parent's."""
    for thing in list(_own):
        with contextlib.suppress(OSError):  # closed by now
            thing.close()
    _own.clear()


os.register_at_fork(after_in_child=leave_behind)
