"""Appointments: at some steps all ranks look up from their work, and agree on what none may decide alone.

No rank may take a snapshot because *its* clock says so, nor end because *it* was asked to: at that step the others
would wait for it in a collective. Agreeing at every step would cost as much as synchronising a small gradient. So they
make appointments: at one step they agree, with one all-reduce of three numbers, on what is to be done and on the step
at which they meet next, about half a second later.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from playground.runtime import device, preempted

INTERVAL = 0.5
"""Seconds from one appointment to the next, about."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks do after the step at which they met."""

    save: bool = False
    """Take a snapshot: it is time."""
    signal: int = 0
    """Take one and end: some rank was asked to, by the signal of this number. 0: none was."""


class Appointments:
    """One rank's diary. The ranks of a world have entered the same in theirs, whatever their clocks say.

    `step` is the number of steps done when it begins, and `seconds`, if not None, the time between two snapshots.
    """

    def __init__(self, step: int, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.next_step = step + 1
        self.last_step, self.last_time = step, time.monotonic()
        self.saved_at = self.last_time

    def keep(self, step: int, at_once: bool = False) -> Agreement:
        """Called after each step, by all ranks: if there is an appointment now, agree. Rank 0's clock counts.

        `at_once`: there is one now, because something has taken time that is no step.
        """
        if step < self.next_step and not at_once:
            return Agreement()
        now = time.monotonic()
        save = now - self.saved_at >= self.seconds
        if save:
            self.saved_at = now
        proposal = [int(save), self.steps_ahead(step, now)] if dist.get_rank() == 0 else [0, 0]
        agreed = torch.tensor([*proposal, preempted() or 0], device=device())
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        due, ahead, signal = agreed.tolist()
        self.last_step, self.last_time, self.next_step = step, now, step + ahead
        return Agreement(save=bool(due), signal=signal)

    def steps_ahead(self, step: int, now: float) -> int:
        """How many steps there are until the next appointment, if they take as long as those since the last one."""
        seconds = min(INTERVAL, max(0.0, self.saved_at + self.seconds - now))
        return max(1, int(seconds * (step - self.last_step) / max(now - self.last_time, 1e-9)))
