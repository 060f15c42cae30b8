"""Proves deadlocks from the states of ranks, whoever brings these: the launcher, from the flight
recorders of this host, or rank 0, from the store of a world that somebody else has started.

States grow old while they are brought together. So a proof takes two steps. What the states show is
a suspicion. The ranks are asked after it, and it is proved if all are still as they were judged:
then they all were so at the moment when they were asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.states import RankState
from playground.explain.hang.wording import Diagnosis


class Judge:
    """What was judged last, and whether the ranks bore it out."""

    def __init__(self) -> None:
        self.judged: object = None
        """What stood still when the ranks were last judged: while it is the same, so are their
        states."""
        self.doubts = 0
        """How often since then a deadlock was suspected that the ranks did not bear out."""

    def suspect(
        self, standing: object, states: Callable[[], Sequence[RankState]]
    ) -> Diagnosis | None:
        """A deadlock that these states show, and of which the ranks are to be asked. What stands
        still as it was judged is not judged again, unless there is a doubt: a rank that has moved
        may stand again where it stood."""
        known = standing == self.judged
        if known and not self.doubts:
            return None
        self.judged = standing
        found = diagnose(states())
        proved = found is not None and found.proved
        if not (known and proved):
            self.doubts = 0
        return found if proved else None

    def confirm(self, found: Diagnosis | None, are_still: Callable[[], bool]) -> Diagnosis | None:
        """The deadlock, if it is proved by all that the ranks have answered, and these are still as
        they were judged."""
        if found and found.proved and are_still():
            return found
        self.doubts += 1
        return None
