"""Worlds that are kept: after a launch its ranks wait for the next one, which then takes
milliseconds.

Only the processes are kept: every launch forms a process group of its own. A world is kept if its
function returned on every rank and left each process as it had found it (`ProcessState`); else the
next launch starts a new one. It serves a caller whose rights, limits, umask and niceness are those
that it was started with. Its generators of random numbers are seeded afresh for each function.
Changes a function makes to modules other than torch's go unnoticed: `launch(..., fresh=True)` is
for that. What it registers with `atexit` runs when the world ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Iterator
from multiprocessing.connection import wait

from playground.world.launcher.ending import dismiss, stop
from playground.world.launcher.fork_client import Caller, read_caller
from playground.world.launcher.rank_handle import RankHandle

MAX_RANKS_KEPT = 32
"""In all worlds together. An idle rank costs some 30 MB."""
_worlds: dict[tuple[int, str, Caller], list[RankHandle]] = {}
_wanted = False


def keep_worlds() -> None:
    """From now on, keep worlds until this process ends or calls `end_worlds`."""
    global _wanted
    _wanted = True


def are_kept() -> bool:
    """Whether worlds are kept at the moment."""
    return _wanted


def end_worlds() -> None:
    """Keep worlds no longer; end those there are."""
    global _wanted
    _wanted = False
    while _worlds:
        end(_worlds.popitem()[1])


@contextlib.contextmanager
def keeping_worlds() -> Iterator[None]:
    """Keep worlds in this context. They end with it, unless they were kept before."""
    wanted_before = _wanted
    keep_worlds()
    try:
        yield
    finally:
        if not wanted_before:
            end_worlds()


atexit.register(end_worlds)
os.register_at_fork(after_in_child=_worlds.clear)


def end(ranks: list[RankHandle]) -> None:
    try:
        dismiss(ranks)
    finally:
        stop(ranks)


def take(size: int, backend: str) -> list[RankHandle]:
    """The ranks of a world that is kept; none if there is no such world, if this process has
    changed in what ranks have from it, or if one of them has ended since."""
    ranks = _worlds.pop((size, backend, read_caller()), [])
    if any(wait([rank.process.sentinel, rank.line], 0) for rank in ranks):
        stop(ranks)
        return []
    return ranks


def keep(ranks: list[RankHandle]) -> bool:
    """Keep this world, if worlds are to be kept and all its processes are as good as new. Logs why
    it is not, at the level DEBUG."""
    if not _wanted or any(rank.vanished for rank in ranks):
        return False
    for rank in ranks:
        if rank.changes:
            words = f"rank {rank.number} of {rank.size} has changed: {', '.join(rank.changes)}"
            logging.getLogger("playground").debug(f"the world is not kept: {words}")
            return False
    size, backend = ranks[0].size, ranks[0].backend.name
    while _worlds and size + sum(map(len, _worlds.values())) > MAX_RANKS_KEPT:
        end(_worlds.pop(next(iter(_worlds))))  # the one that has waited longest
    _worlds[size, backend, ranks[0].process.server.caller] = ranks
    return True
