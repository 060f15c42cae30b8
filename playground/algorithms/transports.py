"""Which transport carries our algorithms' messages in a process group.

A new transport is a file with a function `group -> Transport | None`, and a line in this table. It is called at every
collective, so what is expensive to set up it must keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from playground.algorithms.process_group import ProcessGroupTransport
from playground.algorithms.transport import Transport

Find = Callable[[Any], Transport | None]
"""From a process group to its transport; None if this one does not serve that group."""
TRANSPORTS: list[Find] = [
    ProcessGroupTransport,
]
"""The first that serves a group is used. The last one serves them all."""


def transport_of(group: Any) -> Transport:
    """The transport for the messages of this process group."""
    for find in TRANSPORTS:
        if transport := find(group):
            return transport
    raise LookupError(f"no transport serves {group}")


@contextlib.contextmanager
def use_transport(find: Find) -> Iterator[None]:
    """Prefer this transport for every collective of ours that begins inside the `with`. All ranks must do the same."""
    TRANSPORTS.insert(0, find)
    try:
        yield
    finally:
        TRANSPORTS.remove(find)
