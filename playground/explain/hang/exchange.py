"""Ranks that somebody else has started, maybe on several hosts: each tells the others through the
store where it stands still, and rank 0 looks for a deadlock.

What is told grows old. So rank 0, when it suspects a deadlock, asks all ranks whether they still
are as they have told, and whether they have told anything new since: see `judge`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from playground.base.untrusted import unpickle
from playground.explain.hang.activity import Activity, compare, look
from playground.explain.hang.box import LATEST, Box, View, find_lines
from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.differences import find_mismatch
from playground.explain.hang.judge import Judge
from playground.explain.hang.states import UNASKED, Channel, Doing, Gpu, Operation, RankState
from playground.explain.hang.streams import suppose_wait
from playground.explain.hang.wording import Diagnosis

if TYPE_CHECKING:
    import torch.distributed as dist


class Look(NamedTuple):
    """A rank at one moment, as it sees itself."""

    progress: object
    """As `View.progress`."""
    activity: Activity | None


class Exchange:
    """A rank's part in it."""

    def __init__(self, store: dist.Store, rank: int, size: int, box: Box, port: int) -> None:
        """`port` is the store's."""
        self.store = store
        self.rank = rank
        self.size = size
        self.port = port
        self.view = View(os.getpid(), box.file)
        self.seen = Look(None, None)
        """The last look."""
        self.told: Look | None = None
        """The look of which it has told the others."""
        self.judge = Judge()
        """Rank 0's. It knows what ranks have told by how often they have told of themselves."""
        self.answered = 0
        """The last question of rank 0's that this rank has answered."""
        self.suspicion: tuple[int, Diagnosis] | None = None
        """On rank 0, a question, and the deadlock that is proved if all have not moved."""

    def look(self) -> Diagnosis | None:
        """Tell the others if this rank stands still since the last look, or does so no more.
        Returns a deadlock if one is proved: on rank 0 alone. Raises what the store does."""
        before = self.seen
        self.seen = Look(self.view.progress, look(self.port))
        still = self.seen == before and (self.view.waits or self.view.has_ended)
        if still and self.seen != self.told:
            self.store.set(f"state {self.rank}", pickle.dumps(self.state()))
            self.store.add("states", 1)
            self.told = self.seen
        if (asked := self.store.add("asked", 0)) > self.answered:
            self.answered = asked
            self.store.set(
                f"answer {asked} of {self.rank}", "still" if self.seen == self.told else "moved"
            )
        return self.find_deadlock() if self.rank == 0 else None

    def find_deadlock(self) -> Diagnosis | None:
        """A deadlock, once all ranks have answered that they stand still as they have told."""
        if self.suspicion:
            asked, suspected = self.suspicion
            keys = [f"answer {asked} of {rank}" for rank in range(self.size)]
            if not self.store.check(keys):
                return None
            self.suspicion = None
            if deadlock := self.judge.confirm(suspected, lambda: self.are_still(keys)):
                return deadlock
        # counted before they are read: what is told in between is told after they were judged
        if found := self.judge.suspect(self.store.add("states", 0), self.collect):
            self.suspicion = self.store.add("asked", 1), found
        return None

    def are_still(self, keys: list[str]) -> bool:
        """Whether all ranks have answered that they stand still as they have told, and none has
        told anything new since it was judged: it has moved, and may stand still elsewhere."""
        has_moved = {*self.store.multi_get(keys)} != {b"still"}
        return not has_moved and self.store.add("states", 0) == self.judge.judged

    def state(self) -> RankState:
        """This rank's own."""
        state, activity = self.view.read_since(self.seen.progress, LATEST), self.seen.activity
        besides = compare(activity, activity)
        if activity and activity.waits is not None:
            state = suppose_wait(state, activity.waits)
        may_act = state.may_act or besides.may_act
        return replace(state, may_act=may_act, moves=besides.moves, stack=list_own_lines())

    def collect(self) -> list[RankState]:
        """The states of all ranks: those without a report are in the program."""
        states = [RankState(rank=rank, doing=Doing.IN_PROGRAM) for rank in range(self.size)]
        told = [
            (rank, key) for rank in range(self.size) if self.store.check([key := f"state {rank}"])
        ]
        for rank, key in told:
            states[rank] = unpickle(self.store.get(key), RankState, Doing, Gpu, Operation, Channel)
        return states

    def explain(self) -> Diagnosis | None:
        """Why this rank's operation has failed, as far as it can be told. Raises what the store
        does."""
        states = [self.state() if one.rank == self.rank else one for one in self.collect()]
        states = [replace(state, may_act=state.may_act or UNASKED) for state in states]
        return diagnose(states) or find_mismatch(states)


def list_own_lines() -> tuple[str, ...]:
    """The program's lines on the stack of this process's main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (*find_lines(traceback.format_stack(frame)[::-1]),) if frame else ()
