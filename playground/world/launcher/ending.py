"""How the ranks of a world end: they leave, all at once, or are interrupted, or are stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence

from playground.world.launcher.forked_process import LOST_BY_THE_SERVER
from playground.world.launcher.rank_handle import GRACE, RankHandle, describe_exit
from playground.world.launcher.receiving import ask_for_stacks, await_any, receive
from playground.world.rank.assignment import Order
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT

LEAVE_LIMIT = 30.0
"""Seconds a rank has at least to destroy its process group and give its memory back, all results
being in."""
LOOK_INTERVAL = 1.0


def dismiss(ranks: list[RankHandle], timeout: float = DEFAULT_TIMEOUT) -> None:
    """Let the ranks leave, all at once: until they have, they may be silent for `timeout` seconds,
    as their threads and exit functions may take as long as the function itself. Raise `RankFailed`
    for one that cannot leave cleanly."""
    limit = max(timeout, LEAVE_LIMIT)
    for rank in ranks:
        if not rank.vanished:
            rank.order(Order.LEAVE)
    end = time.monotonic() + limit
    while staying := [rank for rank in ranks if rank.process.exitcode is None]:
        if time.monotonic() > end:
            last = staying[-1]
            failure = last.unclean_exit(f"still there after {limit:g} s")
            failure.others = ask_for_stacks([last])
            raise failure
        if receive(staying, LOOK_INTERVAL):
            end = time.monotonic() + limit
        for rank in staying:
            if rank.failure and not rank.vanished:
                raise rank.failure
            # its result is in
            if (code := rank.process.exitcode) not in (None, 0, LOST_BY_THE_SERVER):
                raise rank.unclean_exit(describe_exit(code, rank.backend))


def interrupt(ranks: Sequence[RankHandle], seconds: float) -> None:
    """Pass Ctrl-C on to the ranks and to what they have started, as torchrun does, and kill those
    that have not ended after `seconds`. One that ends does not wait for the others: what they wait
    for from it raises an error there."""
    present = [rank for rank in ranks if rank.up]
    leaving: set[RankHandle] = set()
    for rank in present:
        rank.order(Order.INTERRUPT_ALL)
    end = time.monotonic() + seconds
    while present and (left := end - time.monotonic()) > 0:
        receive(present, left)
        present = [rank for rank in present if not rank.vanished]
        for rank in present:
            if (rank.done or rank.failure) and rank not in leaving:
                leaving.add(rank)
                rank.order(Order.LEAVE)
    for rank in present:
        rank.process.kill()


def stop(ranks: list[RankHandle], seconds: float = GRACE) -> None:
    """End what is left of the ranks: the closed line asks them, SIGTERM those that have not failed,
    then SIGKILL. What they still do, exit functions of one that has failed and handlers of SIGTERM
    in the others, may take so many seconds."""
    try:
        for rank in ranks:
            rank.relay_output()
    finally:  # whoever was to read that may be gone
        try:
            for rank in ranks:
                rank.line.close()
                # the start of one is not to be waited for, and one that is stopped hears nothing
                hears = rank.up and not rank.is_stopped()
                if not hears:
                    rank.process.kill()
                # which ignores it, but loses what is left of a write that it interrupts
                elif not rank.has_told_failure:
                    rank.process.terminate()
            await_ends(ranks, seconds)
        finally:  # Ctrl-C may come once more
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.close()


def await_ends(ranks: Sequence[RankHandle], seconds: float) -> None:
    """Wait for the ends of these ranks' processes, so many seconds at most. What they print until
    then is passed on."""
    end = time.monotonic() + seconds
    while staying := [rank for rank in ranks if rank.process.exitcode is None]:
        if (left := end - time.monotonic()) <= 0:
            break
        await_any(staying, [rank.process.sentinel for rank in staying], min(left, LOOK_INTERVAL))
    for rank in ranks:
        rank.relay_output()
