"""Looks at the ranks' flight recorders from time to time, and brings what they hold to the judge: a
deadlock is reported when proved, not when time is up."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from playground.base.errors import PeerDisconnected, PlaygroundError, RankFailed, has_timed_out
from playground.explain.hang import UNASKED, Doing, Operation, RankState
from playground.explain.hang.activity import Besides
from playground.explain.hang.box import LATEST, find_line
from playground.explain.hang.box_format import CAPACITY
from playground.explain.hang.diagnosis import diagnose, explain_failure
from playground.explain.hang.differences import find_mismatch
from playground.explain.hang.judge import Judge
from playground.explain.hang.streams import suppose_wait
from playground.explain.hang.wording import Diagnosis
from playground.explain.hang.workers import add_place
from playground.world.launcher.rank_handle import RankHandle

INTERVAL = 0.25
MOST_INTERVALS = 16
"""Number of intervals that the next look waits at most if a deadlock was found, but not borne
out."""
LATEST_OF_ENDED = 256
"""Number of a rank's latest operations that are looked at when it has returned."""
Answers = Mapping[int, Besides]
"""By rank, what may act in it besides its main thread; nothing, in those that are not asked any
more."""


class Examiner:
    """Examines the ranks of a world."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self.ranks = ranks
        self.began = 0.0
        """When the program began, on the monotonic clock: a rank that has finished without calling
        anything since is not at the line of what it called before."""
        self.next_look = time.monotonic() + INTERVAL
        self.last: list[object] = []
        """The progress of each rank at the last look."""
        self.judge = Judge()

    @property
    def seconds_left(self) -> float:
        """Until the next look is due."""
        return max(0.0, self.next_look - time.monotonic())

    def find_deadlock(self) -> Diagnosis | None:
        """A deadlock that is proved if nothing but main threads acts: two looks have found the
        same, and no operation can complete. Does nothing until a look is due."""
        if self.seconds_left:
            return None
        self.next_look = time.monotonic() + INTERVAL
        before = self.last
        self.last = self.progress
        still = self.find_still(before, self.last)
        standing = [
            progress if rank in still else None
            for rank, progress in zip(self.ranks, self.last, strict=True)
        ]
        if not any(rank.box and rank.box.waits for rank in still):
            return None
        return self.judge.suspect(standing, lambda: self.suspected_states(still))

    def confirm(
        self, before: list[object], stacks: Mapping[int, str], answers: Answers
    ) -> Diagnosis | None:
        """A deadlock that is proved: of the ranks whose progress is the same as `before`."""
        now = self.progress
        still = self.find_still(before, now)
        deadlock = self.judge.confirm(
            self.explain(stacks, answers, still),
            lambda: {*still} <= {*self.find_still(now, self.progress)},
        )
        if not deadlock:
            pause = INTERVAL * min(2**self.judge.doubts, MOST_INTERVALS)
            self.next_look = time.monotonic() + pause
        return deadlock

    def find_reason(self, stacks: Mapping[int, str], answers: Answers) -> Diagnosis | None:
        """Why the ranks stand still, as far as that is known."""
        return diagnose(self.locate(self.states(latest=CAPACITY, answers=answers), stacks))

    @property
    def progress(self) -> list[object]:
        """The progress of each rank: a rank whose progress stays the same stands still."""
        return [(rank.done, rank.vanished, rank.box and rank.box.progress) for rank in self.ranks]

    def find_still(self, before: Sequence[object], now: Sequence[object]) -> list[RankHandle]:
        """The ranks whose progress is the same as before; none of those that had not been seen."""
        looks = zip(self.ranks, before, now, strict=False)
        return [rank for rank, was, is_now in looks if was == is_now]

    def suspected_states(self, still: Collection[RankHandle]) -> list[RankState]:
        """The state of each rank if nothing acts besides the main threads, of which the ranks are
        asked next. Those that are not `still` are about to do something else."""
        return [
            suppose_wait(self.state_of(rank)) if rank in still else go_on(self.state_of(rank))
            for rank in self.ranks
        ]

    def states(
        self,
        still: Collection[RankHandle] | None = None,
        latest: int = LATEST,
        answers: Answers | None = None,
    ) -> list[RankState]:
        """The state of each rank. Those that are not `still` are about to do something else.
        Without `answers`, what acts besides the main threads is not known."""
        states = []
        for rank in self.ranks:
            state = self.state_of(rank, latest)
            if still is not None and rank not in still:
                state = go_on(state)
            elif answers and rank.activity and rank.activity.waits is not None:
                state = suppose_wait(state, rank.activity.waits)
            if answers is not None:
                besides = answers.get(rank.number, Besides())
            else:
                besides = Besides((rank.activity and rank.activity.may_act) or UNASKED)
            may_act = state.may_act or besides.may_act
            states.append(replace(state, may_act=may_act, moves=besides.moves))
        return states

    def state_of(self, rank: RankHandle, latest: int = LATEST) -> RankState:
        """What its flight recorder shows, and what the launcher knows of its end."""
        nothing = RankState(rank=rank.number, doing=Doing.IN_PROGRAM)
        state = (
            rank.box.read(latest) if rank.box and rank.box.programs == rank.assigned else nothing
        )
        if self.began:
            state = replace(state, since=min(state.since, time.monotonic() - self.began))
        if rank.failure:
            end = rank.failure.reason if isinstance(rank.failure, RankFailed) else ""
            waits_for = find_failed(rank.failure, state)
            return replace(state, doing=Doing.DEAD, end=end, waits_for=waits_for)
        if rank.result is not None:
            *before, last = state.operations or (None,)
            if last and last.issued < self.began:
                state = replace(state, operations=(*before, replace(last, line="")))
            return replace(state, doing=Doing.FINISHED)
        return replace(state, doing=Doing.STOPPED) if rank.is_stopped() else state

    def explain(
        self,
        stacks: Mapping[int, str] = MappingProxyType({}),
        answers: Answers | None = None,
        still: Collection[RankHandle] | None = None,
    ) -> Diagnosis | None:
        """Why the ranks stand still, or one has failed, as far as it is known. `stacks` say where
        ranks are."""
        states = self.locate(self.states(still, CAPACITY, answers), stacks)
        if any(state.doing == Doing.DEAD for state in states):
            return explain_failure(states)
        return diagnose(states) or find_mismatch(states)

    def locate(self, states: Sequence[RankState], stacks: Mapping[int, str]) -> list[RankState]:
        """The states, with where the ranks are by these stacks."""
        told = [stacks.get(state.rank, "").splitlines(keepends=True)[::-1] for state in states]
        return [
            add_place(state, stack, rank.process.pid, rank.box)
            for state, stack, rank in zip(states, told, self.ranks, strict=True)
        ]

    def find_mismatch(self) -> Diagnosis | None:
        """An operation in which the ranks did not agree although all of them have returned."""
        found = find_mismatch(self.states(latest=LATEST_OF_ENDED))
        return found and find_mismatch(self.states(latest=CAPACITY))  # which may begin earlier


def go_on(state: RankState) -> RankState:
    """The state of a rank that is about to leave the operation that it is in, if it is in one."""
    if state.doing != Doing.IN_OPERATION:
        return state
    return replace(state, doing=Doing.IN_PROGRAM)


def find_failed(failure: PlaygroundError, state: RankState) -> Operation | None:
    """The operation in which a rank has failed; None if it has failed elsewhere. The program may
    have called others since, below that exception."""
    if not isinstance(failure, RankFailed):
        return None
    is_lost = isinstance(failure, PeerDisconnected) or has_timed_out(failure.traceback)
    if state.waits_for or not is_lost:
        return state.waits_for
    return next((one for one in reversed(state.operations) if not one.raised), None)


def line_of(stack: str) -> str:
    """The innermost line of a stack that is the program's own: "train.py:12 in step"."""
    return find_line(reversed(stack.splitlines(keepends=True)))
