"""Watch the ranks of a world until each has handed in its result, one of them fails, a deadlock is
proved, or all are silent too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from playground.base.errors import (
    FAILS,
    Deadlock,
    PeerDisconnected,
    PlaygroundError,
    ProgramRefused,
    RankFailed,
    RankTimeout,
    StoreFailed,
    has_timed_out,
)
from playground.explain.hang import Kind
from playground.explain.hang.activity import BETWEEN_LOOKS, compare
from playground.explain.hang.standstill import StandstillWatch
from playground.world.launcher.examiner import Examiner
from playground.world.launcher.fork_client import START_LIMIT
from playground.world.launcher.rank_handle import EXIT_LIMIT, RankHandle, describe_exit
from playground.world.launcher.receiving import answer, ask_for_stacks, receive, receive_while
from playground.world.rank.assignment import Order
from playground.world.rank.preemption import PreemptionNotice
from playground.world.rank.reports import Progress

AFTERMATH = 0.25
"""Seconds in which, where ranks have lost another, word of what became of that may still arrive."""
WAITS, REFUSAL_LIMIT = 1.0, 10.0
"""Where a rank has refused what the program was asked: seconds in one operation after which another
rank is taken to wait for it, and to refuse nothing; seconds that all have to refuse."""


@dataclass
class WorldWatch:
    """The launcher's watch over the ranks of a world."""

    ranks: Sequence[RankHandle]
    timeout: float
    """Maximum silence of all ranks in seconds (`START_LIMIT` while one is coming up)."""
    on_report: Progress
    notice: PreemptionNotice
    """The notice of a preemption, which is passed on to the ranks."""
    bare: bool = False
    """Whether they run a program: see `LaunchConfig.bare`."""

    def __post_init__(self) -> None:
        self.silence = 0.0
        """Seconds since a rank was last heard."""
        self.examiner = Examiner(self.ranks)
        self.standstill = StandstillWatch(self.ranks)

    def run(self) -> None:
        """Return once every rank has handed in its result. Raise as soon as one fails, or ranks are
        in a deadlock, or all are silent too long."""
        while not all(rank.done for rank in self.ranks):
            self.look()
        for rank in self.ranks:
            rank.relay_output()
        if mismatch := self.examiner.find_mismatch():
            logging.getLogger("playground").warning(mismatch)

    def look(self) -> None:
        """Wait for messages, and act upon them, upon silence, and upon what the ranks' flight
        recorders show."""
        are_up = all(rank.up or rank.is_stopped() for rank in self.ranks)
        limit = self.timeout if are_up else START_LIMIT
        pause = max(0.0, min(limit - self.silence, self.examiner.seconds_left))
        seconds = min(pause, self.notice.seconds_left)
        received = receive(self.ranks, seconds, self.on_report)
        if self.notice.take():
            for rank in self.ranks:
                rank.order(Order.END)
        self.silence = 0.0 if received else self.silence + pause
        if any(rank.question is not None for rank in self.ranks):
            answer(self.ranks, self.on_report)
            self.silence = 0.0
            self.standstill.begin()
        suspects = self.examiner.find_deadlock()
        stands = self.standstill.look()
        if suspects or stands:
            began = time.monotonic()
            self.judge(stands)
            self.silence += time.monotonic() - began
        if self.silence >= limit:
            raise self.explain(
                RankTimeout(len(self.ranks), self.silence, self.collect_stacks(self.ranks))
            )
        if not any(rank.died for rank in self.ranks):
            self.check_store()
        if any(rank.failure for rank in self.ranks):
            raise self.explain(self.first_failure())

    def check_store(self) -> None:
        """Raise `StoreFailed` if the process that serves the store has ended: no rank can meet
        another any more, and what ranks raise because of that does not say so."""
        for rank in self.ranks:
            if rank.store_process and rank.store_process.process.has_ended:
                code = rank.store_process.process.join(EXIT_LIMIT)
                raise StoreFailed(describe_exit(code, rank.backend))

    def judge(self, stands: bool) -> None:
        """Raise `Deadlock` if the ranks themselves bear it out, those that have returned, too: in
        two looks, no rank has made progress, nothing else acts in those that are blocked, and no
        data is under way. If it `stands`, a run of which that cannot be proved is told of."""
        before, present = self.examiner.progress, [rank for rank in self.ranks if not rank.vanished]
        ask_for_stacks(present, self.on_report)
        looks = {rank: rank.activity for rank in present}
        time.sleep(BETWEEN_LOOKS)
        ask_for_stacks(present, self.on_report)
        answers = {rank.number: compare(looks[rank], rank.activity) for rank in present}
        if any(rank.question is not None for rank in self.ranks):
            return  # it goes on as soon as it is answered
        stacks = {rank.number: rank.stack for rank in present if rank.result is None}
        if diagnosis := self.examiner.confirm(before, stacks, answers):
            raise Deadlock(len(self.ranks), self.silence, stacks, diagnosis)
        if stands and (found := self.examiner.find_reason(stacks, answers)):
            self.standstill.tell(found)

    def explain(self, failure: PlaygroundError) -> PlaygroundError:
        """The failure, with the diagnosis of the flight recorders."""
        stacks = failure.others if isinstance(failure, RankFailed) else {}
        if isinstance(failure, RankTimeout):
            stacks = failure.stacks
        found = self.examiner.explain(stacks)
        if found and found.kind != Kind.LOST:  # that a rank has failed is what the failure says
            failure.diagnosis = found
        return failure

    def first_failure(self) -> PlaygroundError:
        """The failure that caused the others.

        A rank that raised stays up until it is stopped, so no rank fails because of it. A rank that
        died took its sockets along, and word of the exceptions this causes in its peers may
        overtake word of its death: it is ending by then.
        """
        ranks = self.ranks

        def one_is_about_to_die() -> bool:
            return not any(rank.died for rank in ranks) and any(rank.is_ending() for rank in ranks)

        def all_lost_another() -> bool:
            failures = [rank.failure for rank in ranks if rank.failure]
            return all(isinstance(failure, PeerDisconnected) for failure in failures)

        def order(rank: RankHandle) -> tuple[bool, bool, float]:
            return not rank.died, isinstance(rank.failure, PeerDisconnected), rank.failed_at

        receive_while(one_is_about_to_die, ranks, EXIT_LIMIT, self.on_report)
        receive_while(all_lost_another, ranks, AFTERMATH, self.on_report)
        first = min((rank for rank in ranks if rank.failure), key=order).failure
        assert first
        if self.bare and isinstance(first, RankFailed) and first.refusal:
            return self.find_refusal() or first
        if isinstance(first, RankFailed) and has_timed_out(first.traceback):
            self.note_others(first)
        return first

    def note_others(self, first: RankFailed) -> None:
        """Note what the other ranks did while this one waited for one of them: where they stand,
        or how they have ended."""
        others = self.collect_stacks([rank for rank in self.ranks if not rank.failure])
        first.others = {rank: stack for rank, stack in others.items() if stack != FAILS}
        named = {first.rank, *first.others}
        first.outcomes = {
            rank.number: describe_outcome(rank, first)
            for rank in self.ranks
            if rank.number not in named
        }

    def find_refusal(self) -> ProgramRefused | None:
        """What all ranks of a program refuse, after one has: the others are given time for it
        unless one of them waits for a rank, or has ended."""
        stood: dict[RankHandle, tuple[object, float]] = {}

        def may_refuse(rank: RankHandle) -> bool:
            waits_in = rank.box and rank.box.waits and rank.box.progress
            before, since = stood.get(rank, (None, 0.0))
            if not waits_in or waits_in != before:
                stood[rank] = waits_in, time.monotonic()
                return not rank.done
            return time.monotonic() - since < WAITS

        def others_may_refuse() -> bool:
            others = [rank for rank in self.ranks if not rank.failure]
            return bool(others) and all(map(may_refuse, others))

        end = time.monotonic() + REFUSAL_LIMIT
        while others_may_refuse() and time.monotonic() < end:
            receive(self.ranks, BETWEEN_LOOKS, self.on_report)
        refusals = [getattr(rank.failure, "refusal", "") for rank in self.ranks]
        return ProgramRefused(refusals[0]) if all(refusals) else None

    def collect_stacks(self, ranks: Sequence[RankHandle]) -> dict[int, str]:
        """By rank, the Python stack of each of these that is unfinished."""
        unfinished = [rank for rank in ranks if rank.result is None and not rank.vanished]
        return ask_for_stacks(unfinished, self.on_report)


def describe_outcome(rank: RankHandle, first: RankFailed) -> str:
    """What became of a rank that stands nowhere, after the failure `first` of another one."""
    if rank.result is not None:
        return "finished"
    if isinstance(rank.failure, RankFailed):
        # the same exception: its message may name another rank, or another time
        one, other = (failure.reason.split(":")[:2] for failure in (first, rank.failure))
        return "failed in the same way" if one == other else f"failed, too: {rank.failure.headline}"
    return "failed, too"
