"""Watch the ranks of a world until each has handed in its result, one of them fails, a deadlock is proved, or all are
silent too long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import wait
from typing import Any

from playground.runtime.black_box import Kind
from playground.runtime.black_box.activity import BETWEEN_LOOKS, compare
from playground.runtime.errors import (
    TIMED_OUT,
    UNHEARD,
    Deadlock,
    PeerDisconnected,
    PlaygroundError,
    RankFailed,
    RankTimeout,
    UsageError,
)
from playground.runtime.launcher.examine import Examiner
from playground.runtime.launcher.output import Output
from playground.runtime.launcher.rank_handle import GRACE, RankHandle
from playground.runtime.rank.preemption import PreemptionNotice
from playground.runtime.rank.rank import Event, Progress

OnLoss = Callable[[RankFailed], None]
"""Takes the end of an expendable rank, without which the others continue."""
START_LIMIT = 300.0
"""Seconds a new process may take to come up (a cold disk reads torch slowly; spawned ranks read it each)."""
AFTERMATH = 0.25
"""Seconds in which, after a first failure, word of another rank's sudden death may still arrive and outrank it."""


def watch(
    ranks: list[RankHandle], timeout: float, on_report: Progress, notice: PreemptionNotice, on_loss: OnLoss
) -> None:
    """Return once every rank has handed in its result. Raise as soon as one fails, or ranks are in a deadlock, or all
    are silent for `timeout` seconds (`START_LIMIT` while one is coming up, unless it is stopped).

    A preemption that `notice` tells of is passed on to the ranks. An expendable rank that dies is lost: `on_loss` is
    told, and its result is not waited for. On SIGQUIT (Ctrl-\\ at a terminal), who waits for whom is told on stderr.
    """
    examiner = Examiner(ranks)
    with examiner.on_request():
        watch_under(examiner, ranks, timeout, on_report, notice, on_loss)
    for rank in ranks:
        rank.relay_output()
    if silent := examiner.find_mismatch():
        logging.getLogger("playground").warning(silent)


def watch_under(
    examiner: Examiner,
    ranks: list[RankHandle],
    timeout: float,
    on_report: Progress,
    notice: PreemptionNotice,
    on_loss: OnLoss,
) -> None:
    """Watch, and have the ranks examined from time to time."""
    silence = 0.0
    while not all(rank.done for rank in ranks):
        starting = [rank for rank in ranks if not rank.up]
        limit = START_LIMIT if starting and not any(rank.is_stopped() for rank in starting) else timeout
        pause = max(0.0, min(limit - silence, examiner.seconds_left))
        heard = listen(ranks, min(pause, notice.seconds_left), on_report, notice.ears)
        if notice.take():
            for rank in ranks:
                rank.order("end")
        silence = 0.0 if heard or any(rank.paused for rank in ranks) else silence + pause
        if examiner.find_deadlock():
            began = time.monotonic()
            raise_deadlock(ranks, examiner, silence, on_report)
            silence += time.monotonic() - began
        if silence >= limit:
            raise explained(RankTimeout(len(ranks), silence, collect_stacks(ranks)), examiner)
        if any(rank.failure and not rank.lost for rank in ranks):
            lose_dead(ranks, examiner, on_report, on_loss)


def raise_deadlock(ranks: list[RankHandle], examiner: Examiner, silence: float, on_report: Progress) -> None:
    """Raise `Deadlock` if the ranks themselves bear it out, those that have returned, too: in two looks, no rank has
    gone on, nothing else acts in those that are blocked, and no data is under way."""
    before, present = examiner.progress, [rank for rank in ranks if not rank.vanished]
    ask_for_stacks(present, on_report)
    looks = {rank: rank.activity for rank in present}
    time.sleep(BETWEEN_LOOKS)
    ask_for_stacks(present, on_report)
    seen = {rank.number: compare(looks[rank], rank.activity) for rank in present}
    stacks = {rank.number: rank.stack for rank in present if rank.result is None}
    if diagnosis := examiner.confirm(before, stacks, seen):
        raise Deadlock(len(ranks), silence, stacks, diagnosis)


def explained(failure: PlaygroundError, examiner: Examiner) -> PlaygroundError:
    """The failure, with what the black boxes tell of it."""
    found = examiner.explain(failure.stacks if isinstance(failure, RankTimeout) else {})
    if found and found.kind != Kind.LOST:  # that a rank has failed is what the failure says
        failure.diagnosis = found
    return failure


def listen(ranks: list[RankHandle], seconds: float, on_report: Progress, others: Sequence[int] = ()) -> bool:
    """Wait for word from any rank, take in what there is; False if `seconds` passed in silence.

    What a rank prints is word from it, and passed on as it comes. So are descriptors in `others` that are ready.
    """
    present = [rank for rank in ranks if not rank.vanished]
    sources = [rank.line for rank in present] + [rank.process.sentinel for rank in present]
    ready = set(wait_relaying(ranks, [*sources, *others], seconds))
    events: list[tuple[int, Event]] = []
    for rank in present:
        ended = rank.process.sentinel in ready
        if ended or rank.line in ready:  # of one that has ended, too, all that it has said is taken in
            events += [(rank.number, event) for event in rank.receive_all()]
        if ended and not rank.vanished:
            rank.vanish()
    for number, event in events:  # not above: what it raises (a closed stdout, say) is not the rank's doing
        on_report(number, event)
    return bool(ready)


def listen_while(condition: Callable[[], bool], ranks: list[RankHandle], seconds: float, on_report: Progress) -> bool:
    """Listen until the condition fails, for `seconds` at most. Returns whether it still holds."""
    end = time.monotonic() + seconds
    while (holds := condition()) and (left := end - time.monotonic()) > 0:
        listen(ranks, left, on_report)
    return holds


def wait_relaying(ranks: list[RankHandle], others: list[Any], seconds: float) -> list[Any]:
    """Wait until there is something at one of `others`, or in a pipe that the ranks print to: that is passed on.

    Returns all that was ready, the pipes too; nothing if `seconds` passed in silence.
    """
    outputs: dict[Any, Output] = {
        output.pipe: output for rank in ranks for output in rank.outputs if not output.pipe.closed
    }
    ready = wait([*others, *outputs], seconds)
    for pipe in outputs.keys() & set(ready):
        outputs[pipe].relay()
    return ready


def lose_dead(ranks: list[RankHandle], examiner: Examiner, on_report: Progress, on_loss: OnLoss) -> None:
    """The ranks that have died are lost, if all of them are expendable: `on_loss` is told of each.

    Raise the first failure if another one has failed, or fails in the `AFTERMATH`: it cannot go on without them. If it
    says that it has lost somebody, raise what that one died of, even if it was lost before.
    """
    remaining = [rank for rank in ranks if not rank.lost]

    def others_go_on() -> bool:
        return all(rank.running for rank in ranks) and all(rank.may_be_lost for rank in remaining if rank.failure)

    if not listen_while(others_go_on, ranks, AFTERMATH, on_report):
        failure, lost = first_failure(remaining, on_report), [rank for rank in ranks if rank.lost]
        if lost and isinstance(failure, PeerDisconnected):
            failure = max(lost, key=lambda rank: rank.failed_at).failure or failure
        raise explained(failure, examiner)
    for rank in remaining:
        if isinstance(rank.failure, RankFailed):
            rank.lost = True
            on_loss(rank.failure)


def first_failure(ranks: list[RankHandle], on_report: Progress) -> PlaygroundError:
    """The failure that caused the others.

    A rank that raised stays up until it is stopped, so no rank fails because of it. A rank that died took its sockets
    along, and word of the exceptions this causes in its peers may overtake word of its death.
    """
    listen_while(lambda: not any(rank.vanished for rank in ranks), ranks, AFTERMATH, on_report)
    failed = [rank for rank in ranks if rank.failure]
    first = min(
        failed, key=lambda rank: (not rank.vanished, isinstance(rank.failure, PeerDisconnected), rank.failed_at)
    )
    assert first.failure
    if isinstance(first.failure, RankFailed) and TIMED_OUT.search(first.failure.traceback):
        # It waited for somebody: the reader wants to know what the others were doing instead.
        first.failure.others = collect_stacks([rank for rank in ranks if not rank.failure])
    return first.failure


def collect_stacks(ranks: list[RankHandle]) -> dict[int, str]:
    """Where each unfinished rank stands: its Python stack."""
    return ask_for_stacks([rank for rank in ranks if rank.result is None and not rank.vanished])


def ask_for_stacks(ranks: list[RankHandle], on_report: Progress | None = None) -> dict[int, str]:
    """Where each of these ranks stands."""
    for rank in ranks:
        rank.stack, rank.activity = UNHEARD, None
        rank.order("where")
    listen_while(lambda: any(rank.stack == UNHEARD for rank in ranks), ranks, GRACE, on_report or ignore)
    return {rank.number: rank.stack for rank in ranks}


def ignore(rank: int, event: Event) -> None:
    """A report that comes too late to matter."""


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
