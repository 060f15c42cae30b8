"""Receive from whoever sends: the sender is what recv returns, and tags keep kinds of messages apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from playground.exercises.cases import Case, Cases, coded
from playground.exercises.exercise import COLLECTIVES, COMPUTES, MESSAGES
from playground.runtime.rank.rank import report
from playground.runtime.tap.replacement import replaced

SIGN = 3
"""A tag of the judge's own."""


def cases(rank: int, size: int, seed: int) -> Cases:
    orders = ("in order", "last rank first", "letters last rank first", "rank 1 only after a parcel of another")
    for place, order in enumerate(orders[: 3 if size == 2 else 4]):
        given = [(coded(other, 3), 2 * coded(other, 3)) for other in range(size)]
        returns = [list(each) for each in zip(*given, strict=True)] if rank == 0 else None
        delay = 0.08 * (size - rank if place == 1 else rank)
        run = partial((send_slowly, let_rank_1_wait)[place - 2], rank, size, given[rank]) if place >= 2 else None
        yield Case(f"they come {order}", given[rank], returns=returns, delay=delay, run=run)


def send_slowly(rank: int, size: int, given: tuple[object, object], function: Callable[..., object]) -> object:
    """Between a parcel and its letter lies the longer, the lower the rank is."""
    return run_with(partial(time.sleep, 0.16 * (size - rank) * (rank > 0)), partial(function, rank, size, *given))


def let_rank_1_wait(rank: int, size: int, given: tuple[object, object], function: Callable[..., object]) -> object:
    """Rank 1 comes when the last rank's first send has returned, or that rank calls anything else."""
    sign, last = torch.zeros(1), size - 1
    send, recv = (each.__wrapped__ for each in (dist.send, dist.recv))  # not those that are recorded
    if rank == 1:
        report(at=(f"comes after rank {last}'s parcel", None, 0))
        recv(sign, last, tag=SIGN)
        time.sleep(0.16)  # the last rank goes on, too
        report(at=COMPUTES)
    signs = iter([partial(send, sign, 1, tag=SIGN)] if rank == last else [])
    return run_with(lambda: next(signs, bool)(), partial(function, rank, size, *given))


def run_with(pause: Callable[[], object], solve: Callable[[], object]) -> object:
    """Solve, with a pause after each send, and before each other call."""

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if real.__name__ != "send":
                pause()
                return real(*args, **kwargs)
            sent = real(*args, **kwargs)
            pause()
            return sent

        return call

    with contextlib.ExitStack() as replacements:
        for name in (*MESSAGES, *COLLECTIVES):
            replacements.enter_context(replaced(dist, name, wrap))
        return solve()
