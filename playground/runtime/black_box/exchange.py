"""Ranks that somebody else has started, maybe on several hosts: each tells the others through the store where it stands
still, and rank 0 looks for a deadlock.

What is told grows old, but does no harm. That a rank waits is believed only as long as no other has called what it
waits for, and what others have called can only grow: so it has stood there all the time.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from playground.runtime.black_box import IN_PROGRAM, Operation, RankState
from playground.runtime.black_box.box import LATEST, Box, View, count_other_threads
from playground.runtime.black_box.diagnosis import Diagnosis, diagnose, find_mismatch

if TYPE_CHECKING:
    import torch.distributed as dist


class Exchange:
    """A rank's part in it."""

    def __init__(self, store: dist.Store, rank: int, size: int, box: Box) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.view = View(os.getpid(), box.file)
        self.seen: object = None
        """This rank's progress at the last look."""
        self.told: object = None
        """… when it told the others of it."""
        self.judged = -1
        """How often ranks had told of themselves when they were last judged."""

    def look(self) -> Diagnosis | None:
        """Tell the others if this rank stands still since the last look. Returns a deadlock if one is proved: on rank 0
        alone. Raises what the store does."""
        before, self.seen = self.seen, self.view.progress
        if self.seen == before and self.seen != self.told and (self.view.waits or self.view.has_ended):
            self.store.set(f"state {self.rank}", encode(self.state()))
            self.store.add("states", 1)
            self.told = self.seen
        if self.rank > 0 or (told := self.store.add("states", 0)) == self.judged:
            return None
        self.judged = told
        found = diagnose(self.collect())
        return found if found and found.proved else None

    def state(self) -> RankState:
        """This rank's own."""
        state = self.view.read_since(self.seen, LATEST)
        return replace(state, has_other_threads=state.has_other_threads or count_other_threads() > 0)

    def collect(self) -> list[RankState]:
        """What all ranks do: those that have told nothing are in the program."""
        states = []
        for rank in range(self.size):
            key = f"state {rank}"
            if rank == self.rank:
                states.append(self.state())
            elif self.store.check([key]):
                states.append(decode(self.store.get(key)))
            else:
                states.append(RankState(rank=rank, doing=IN_PROGRAM))
        return states

    def explain(self) -> Diagnosis | None:
        """Why this rank's operation has failed, as far as it can be told. Raises what the store does."""
        states = self.collect()
        return diagnose(states) or find_mismatch(states)


def encode(state: RankState) -> str:
    return json.dumps({**asdict(state), "counts": list(state.counts.items())})


def decode(text: bytes) -> RankState:
    content = json.loads(text)
    waits_for = content.pop("waits_for")
    operations = tuple(operation_of(each) for each in content.pop("operations"))
    counts = {(kind, tuple(group), peer, tag): count for (kind, group, peer, tag), count in content.pop("counts")}
    return RankState(**content, operations=operations, counts=counts, waits_for=waits_for and operation_of(waits_for))


def operation_of(content: Any) -> Operation:
    content |= {"group": tuple(content["group"]), "shape": tuple(content["shape"])}
    return Operation(**content)
