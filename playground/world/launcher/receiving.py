"""What ranks send: messages, output, questions, and where they stand when they are asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from playground.base.errors import UNHEARD
from playground.world.launcher.rank_handle import GRACE, RankHandle
from playground.world.rank.assignment import Order
from playground.world.rank.reports import Event, Progress

TURN = 0.2
"""Seconds in which a rank that has been answered asks again, before it is another's turn."""


def ignore_report(rank: int, event: Event) -> None:
    """The default for the reports of ranks."""


def receive(
    ranks: Sequence[RankHandle], seconds: float, on_report: Progress = ignore_report
) -> bool:
    """Wait for messages of these ranks and take in what there is; False if `seconds` passed in
    silence.

    What a rank prints counts as a message, and is passed on as it comes.
    """
    present = [rank for rank in ranks if not rank.vanished]
    sources = [rank.line for rank in present if not rank.hung_up]
    sources += [rank.process.sentinel for rank in present]
    ready = await_any(ranks, sources, seconds)
    events: list[tuple[int, Event]] = []
    for rank in present:
        ended = rank.process.sentinel in ready
        if ended or rank.line in ready:  # of one that has ended, too, all messages are taken in
            events += [(rank.number, event) for event in rank.receive_all()]
        if ended and not rank.vanished:
            rank.vanish()
    # not above: what it raises (a closed stdout, say) is not the rank's doing
    for number, event in events:
        on_report(number, event)
    return bool(ready)


def await_any(ranks: Sequence[RankHandle], sources: Sequence[Any], seconds: float) -> set[Any]:
    """Wait for one of `sources`, or for output of these ranks, which is passed on; what there was,
    empty after `seconds`."""
    outputs = [output for rank in ranks for output in rank.outputs]
    end = time.monotonic() + seconds
    while True:
        now = time.monotonic()
        left = max(0.0, end - now)
        pause = min([left, *(output.seconds_left(now) for output in outputs)])
        pipes = [output.pipe for output in outputs if output.is_read(now)]
        ready: set[Any] = set(wait([*sources, *pipes], pause))
        for output in outputs:
            if output.pipe in ready and not output.holder:  # none of them has begun a long line
                output.relay()
        for rank in ranks:
            rank.relay_parts()
        if ready or pause == left:
            return ready


def receive_while(
    condition: Callable[[], bool],
    ranks: Sequence[RankHandle],
    seconds: float,
    on_report: Progress = ignore_report,
) -> bool:
    """Receive until the condition fails, for `seconds` at most. Returns whether it still holds."""
    end = time.monotonic() + seconds
    while (holds := condition()) and (left := end - time.monotonic()) > 0:
        receive(ranks, left, on_report)
    return holds


def answer(ranks: Sequence[RankHandle], on_report: Progress = ignore_report) -> None:
    """Have a person answer the ranks that ask, one after the other; each as long as it asks."""

    def is_quiet(rank: RankHandle) -> bool:
        return not (rank.question is not None or rank.done or rank.failure or rank.vanished)

    for rank in ranks:
        while rank.question is not None and not (rank.failure or rank.vanished):
            rank.relay_output()
            try:
                rank.answer(input(f"{rank.outputs[0].label}{rank.question}"))
            except Exception as error:  # the input has ended, or there is none in this notebook
                rank.answer(None, str(error))
            finally:
                receive(ranks, 0, on_report)  # what others have sent meanwhile
            for output in rank.outputs:
                output.end = b"\n"
            receive_while(partial(is_quiet, rank), ranks, TURN, on_report)


def ask_for_stacks(
    ranks: Sequence[RankHandle], on_report: Progress = ignore_report
) -> dict[int, str]:
    """By rank, where each of these stands."""
    for rank in ranks:
        rank.stack = UNHEARD
        rank.activity = None
        rank.order(Order.WHERE)

    def may_answer() -> bool:
        return any(
            rank.stack == UNHEARD and not (rank.hung_up or rank.is_stopped()) for rank in ranks
        )

    receive_while(may_answer, ranks, GRACE, on_report)
    return {rank.number: rank.stack for rank in ranks}
