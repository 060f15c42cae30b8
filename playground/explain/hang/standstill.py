"""A run that stands still, and of which no deadlock is proved, is told of and goes on.

A rank may wait because of what nothing here can see: a thread that sends a minute later, a download
that another rank is in. So a notice ends nothing and accuses nobody without "probably". It says in
which call each rank is, at which line, what a proof lacks, and what would help.

| what stands still                              | is told                                         |
|------------------------------------------------|-------------------------------------------------|
| ranks that wait for each other, for one that   | after `LIMIT` seconds, with the table of all    |
| has finished, or for one that does not exist   | ranks and the reason why it is not proved       |
| ranks that wait for one in the program's own   | after `PATIENCE` seconds, in one line, once     |
| code, or for the network                       | in a run                                        |
| ranks beside one that computes, or that waits  | not at all                                      |
| for a person's answer                          |                                                 |

No rank has made progress as long as each is in the call in which it was, or in none. A rank that
computes is told from one that sleeps by the time that its process has used, of all threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from playground.base.process_status import process_status
from playground.base.wrapping import wrap_sentence
from playground.explain.hang.activity import RUNNABLE
from playground.explain.hang.box import View
from playground.explain.hang.diagnosis import STRAGGLERS
from playground.explain.hang.states import Kind
from playground.explain.hang.wording import Diagnosis

LIMIT = 8.0
"""Seconds after which a standstill is told that is probably a deadlock."""
PATIENCE = 30.0
"""Seconds after which any other is told, once."""
SETTLED = 1.0
"""Seconds after which a standstill is one whose processor time is counted: a look at a run that
moves costs nothing more."""
BUSY = 0.05
"""Share of a core that a process uses which computes. One that waits uses less, whatever polls
there."""
TICKS = 100
"""Units of processor time in a second. Source: proc_pid_stat(5), sysconf(_SC_CLK_TCK)"""
SURE = Kind.UNWAITED, Kind.TOO_FEW
"""Kinds that are told as soon as those that are probably a deadlock: no patience helps."""


class Watched(Protocol):
    """A rank of this host that may stand still."""

    @property
    def done(self) -> bool: ...
    @property
    def vanished(self) -> bool: ...
    @property
    def box(self) -> View | None: ...
    @property
    def question(self) -> str | None: ...
    @property
    def pid(self) -> int: ...


@dataclass
class StandstillWatch:
    """What is known of how long the ranks of a world have stood still, and of what was told."""

    ranks: Sequence[Watched]
    say: Callable[[str], object] = logging.getLogger("playground").warning
    since: float = field(default_factory=time.monotonic)
    calls: list[object] = field(default_factory=list)
    """The calls in which the ranks are."""
    used: list[int] | None = None
    """The processor time of each rank when it had stood still for `SETTLED` seconds."""
    was_patient: bool = False
    """Whether ranks have been looked at that have stood still for `PATIENCE` seconds."""
    is_looked_at: bool = False
    """Whether they have been looked at that have stood still for `LIMIT` seconds."""
    told: set[str] = field(default_factory=set)

    def look(self) -> bool:
        """Look at the ranks; whether they are to be asked why they stand still. To be called
        often."""
        calls: list[object] = [
            (rank.done, rank.vanished, rank.box and rank.box.calls) for rank in self.ranks
        ]
        waits = any(rank.box and rank.box.waits for rank in self.ranks)
        if calls != self.calls or not waits or any(rank.question for rank in self.ranks):
            self.calls = calls
            self.begin()
            return False
        seconds = self.seconds
        if self.used is None:
            if seconds >= SETTLED:
                self.used = self.count_ticks()
            return False
        if seconds < LIMIT or (self.is_looked_at and (seconds < PATIENCE or self.was_patient)):
            return False
        if any(process_status(rank.pid)[:1] in RUNNABLE for rank in self.ranks):
            return False  # it computes, or would if it had a core; or it looks around for a moment
        if self.computes():
            self.begin()
            return False
        self.is_looked_at = True
        self.was_patient = seconds >= PATIENCE
        return True

    def begin(self) -> None:
        """A standstill may begin now."""
        self.since = time.monotonic()
        self.used = None
        self.is_looked_at = self.was_patient = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def computes(self) -> bool:
        """Whether the main thread of a rank has computed in this standstill."""
        used = zip(self.used or [], self.count_ticks(), strict=True)
        return any(now - was > BUSY * TICKS * self.seconds for was, now in used)

    def count_ticks(self) -> list[int]:
        """The processor time of each rank's main thread. (A thread of gloo's may spin while its
        program stands still.)"""
        pids = [rank.pid for rank in self.ranks]
        return [sum(map(int, process_status(pid, "task", str(pid))[11:13])) for pid in pids]

    def tell(self, found: Diagnosis) -> None:
        """Say why the ranks stand still, unless that has been said, or patience may help."""
        differs = found.kind == Kind.RUNNING and bool(found.difference)
        is_probable = bool(found.unknown) or found.kind in SURE or differs
        key = found.sentence if is_probable else ""
        if found.proved or key in self.told or not (is_probable or self.was_patient):
            return
        self.told.add(key)
        stood = f"{self.seconds:.0f} s"
        if is_probable:
            said = f"no rank has made progress for {stood}; the run goes on\n{found}"
        else:
            more = "" if found.cure in (found.kind.cure, STRAGGLERS) else f": {found.cure}"
            said = wrap_sentence(f"for {stood}, {' '.join(found.sentence.split())}{more}")
        self.say(f"playground: {said}")
