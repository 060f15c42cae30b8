"""Ranks that somebody else has started, all on this host: rank 0 tells the others' standstill as
the launcher tells that of ranks it has started. Does not import torch.

It reads their flight recorders, which show calls and lines. What may act in a rank besides its main
thread is known from what the rank has told of itself through the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from playground.explain.hang.activity import BETWEEN_LOOKS
from playground.explain.hang.box import View
from playground.explain.hang.box_format import CAPACITY
from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.exchange import Exchange
from playground.explain.hang.standstill import StandstillWatch
from playground.explain.hang.states import UNASKED, Doing, RankState
from playground.explain.hang.wording import Diagnosis
from playground.explain.hang.workers import add_place


@dataclass(frozen=True)
class Neighbour:
    """A rank of this host that is no child of this process."""

    box: View
    vanished = False  # the watch over the peers notices that
    question = None

    @property
    def done(self) -> bool:
        return self.box.has_ended

    @property
    def pid(self) -> int:
        return self.box.pid


class Neighbours:
    """All ranks of a world, this one among them."""

    def __init__(
        self, boxes: Mapping[int, View], exchange: Exchange, say: Callable[[str], object]
    ) -> None:
        """`boxes`: their flight recorders, by rank."""
        self.boxes = boxes
        self.exchange = exchange
        self.watch = StandstillWatch([Neighbour(box) for box in boxes.values()], say)

    def look(self) -> None:
        """Tell if the ranks stand still, and have done so for long. To be called often. Raises what
        the store does."""
        if self.watch.look() and (found := self.find_reason()):
            self.watch.tell(found)

    def find_reason(self) -> Diagnosis | None:
        """Why the ranks stand still, as far as that is known."""
        before = {rank: box.progress for rank, box in self.boxes.items()}
        time.sleep(BETWEEN_LOOKS)
        told = self.exchange.collect()
        return diagnose(
            [
                complete(box.read_since(before[rank], CAPACITY), told[rank], box)
                for rank, box in self.boxes.items()
            ]
        )


def complete(state: RankState, told: RankState, box: View) -> RankState:
    """The state that a rank's flight recorder shows, with where it is if it is in no operation, and
    with what it has `told` of what else acts in it, if it is still there."""
    if state.doing == Doing.IN_PROGRAM:
        state = add_place(state, box.ask_for_stack(), box.pid, box)
    if (state.doing, state.counts) != (told.doing, told.counts):
        return replace(state, may_act=UNASKED)
    return replace(state, may_act=told.may_act, moves=told.moves)
