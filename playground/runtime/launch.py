"""launch(): N processes run one function as one world; results in rank order."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

from playground.runtime import backends, rank as rank_process, server
from playground.runtime.errors import UsageError
from playground.runtime.rank import Progress
from playground.runtime.rendezvous import DEFAULT_TIMEOUT, prepare_rendezvous
from playground.runtime.watch import Rank, release, stop, watch

MAX_RANKS = 128
"""On one host: beyond it the sockets of a full mesh, size² of them, meet the limits of common machines."""
HEAD_START = 5.0
"""Seconds the ranks' own timeouts come after the launcher's, who knows where every rank stands and so is to speak."""


def launch(
    fn: Callable[..., Any],
    size: int,
    *,
    backend: str = "gloo",
    args: tuple[Any, ...] = (),
    timeout: float = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    on_report: Progress | None = None,
) -> list[Any]:
    """Run `fn(rank, size, *args)` on `size` ranks of one new world; return what each returned, in rank order.

    `fn` must be importable by name (a function at the top of a module) and its results must pickle. `timeout`, in
    seconds, bounds the time for which no rank gives a sign of life; `report()` in a rank is one, and arrives at
    `on_report(rank, event)`. While others do give one, an operation of the process group may take 5 s longer.

    Raises `UsageError` before anything is started; `RankFailed` for the first rank that raised or died;
    `RankTimeout`, with every unfinished rank's Python stack, when the timeout passes. However it ends, Ctrl-C
    included, no rank outlives the call; if this process is killed, they end by themselves.
    """
    server.leave_if_imported()
    check(size, backend, timeout)
    work = pickle_work(fn, args)
    rendezvous, listener = prepare_rendezvous(init_method)
    ranks: list[Rank] = []
    try:
        with listener or contextlib.nullcontext():
            for number in range(size):
                settings = (number, size, backend, work, rendezvous, listener if number == 0 else None)
                name = f"rank {number} of {size}"
                process, line = server.start(name, rank_process.main, *settings, timeout + HEAD_START)
                ranks.append(Rank(number, size, process, line, backends.get_backend(backend)))
        watch(ranks, timeout, on_report or (lambda rank, event: None))
        release(ranks)
        return [pickle.loads(rank.result or b"") for rank in ranks]
    finally:
        stop(ranks)


def check(size: int, backend: str, timeout: float) -> None:
    """Raise `UsageError` for a world that cannot be, before anything is started."""
    if not 1 <= size <= MAX_RANKS:
        raise UsageError(f"a world of {size} ranks: one host takes 1 to {MAX_RANKS}; torchrun takes more on several")
    if not 0 < timeout < 1e6:
        raise UsageError(f"a timeout of {timeout} s: use a number of seconds above 0 and below a million")
    backends.get_backend(backend).check(size)


def pickle_work(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The work, ready to travel. Raises `UsageError` if a new process could not find the function."""
    import __main__

    if getattr(fn, "__module__", None) == "__main__" and not hasattr(__main__, "__file__"):
        raise UsageError(
            f"{fn.__qualname__} was defined in a notebook or at a prompt, where the ranks, being new processes, "
            f"cannot see it: write it to a file (%%writefile ranks.py) and import it"
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"{fn!r} or its arguments cannot be sent to another process ({error}): "
            f"use a function at the top of a module, and plain data"
        ) from None
