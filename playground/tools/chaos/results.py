"""The results of killing a training again and again. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from playground.runtime.errors import PlaygroundError
from playground.runtime.flags import check_flags, flag
from playground.survival.comparison import Comparison

RANK, FORK_SERVER, LAUNCHER = "rank", "fork server", "launcher"
WHOM = {"rank": (RANK,), "launcher": (LAUNCHER,), "any": (RANK, RANK, FORK_SERVER, LAUNCHER)}
"""Who may be killed, by the names of --whom; what stands there twice is drawn twice as often."""


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """Raises `UsageError` for numbers below 1."""

    words: tuple[str, ...]
    """The command that trains, and its options."""
    kills: int = flag(5, "Number of processes to kill.", least=1, metavar="K")
    whom: str = flag(
        RANK, "Whom to kill: ranks; the launcher, whose command is then started again; or any process.", choices=WHOM
    )
    seed: int = 1234

    def __post_init__(self) -> None:
        check_flags(self)


class Draws:
    """Who is killed, and when: a seed's own."""

    def __init__(self, seed: int, whom: str) -> None:
        self.random, self.roles = Random(seed), WHOM[whom]

    def role(self) -> str:
        return self.random.choice(self.roles)

    def process(self, pids: Sequence[int]) -> int:
        return self.random.choice(pids)

    def delay(self, starting: float, training: float) -> float:
        """Seconds before a kill, once there is a process of that role after the kill before. `starting`: how long such
        a process takes until its first snapshot is written. `training`: this kill's share of the training that is left.
        A random number from 0 to 1 is squared, so that kills come in quick succession, too; a third is the mean of such
        squares."""
        return self.random.random() ** 2 * (starting + 3 * training)


PHASES = ("no ranks", "starting", "loading", "training", "saving", "ending")
NO_RANKS, STARTING, LOADING, TRAINING, SAVING, ENDING = PHASES
"""The state of a run: no rank is there, or none yet; the ranks have not written a snapshot since they were started;
they are reading one; none of the others, so training or testing; writing one; the last one is written."""


@dataclass(kw_only=True)
class Kill:
    """A process that was killed, and the recovery."""

    role: str
    pid: int
    at: float
    """Seconds since the run was started."""
    phase: str
    step: int
    """Step of the newest whole snapshot then; 0 if there was none."""
    said: str = ""
    """The command's words for the failure; empty if its launcher was killed, or the next kill came so soon that one
    failure was told for several."""
    seconds: float | None = None
    """Seconds until ranks started after the kill had written a whole snapshot; None if none was to come."""


@dataclass(kw_only=True)
class RunRecord:
    """One run of the command, from its first start to its end, however often it was started."""

    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    """How often the command was started: once, and after each kill of its launcher."""
    unexplained: list[str] = field(default_factory=list)
    """Failures that the command told and no kill had caused."""
    notices: list[str] = field(default_factory=list)
    """Its other lines on stderr: snapshots that were passed over, for example."""
    code: int = 0
    """The exit code of its last start."""
    seconds: float = 0.0
    """Seconds until its end."""
    ranks_after: float = 0.0
    """Seconds until there was a rank."""
    first_snapshot_after: float = 0.0
    """Seconds until the first snapshot was whole."""
    last_step: int = 0
    """Step of the newest whole snapshot."""
    comparison: Comparison | None = None
    """Its end, compared with that of the undisturbed run; None if it did not reach one."""

    def check(self) -> None:
        """Raise `PlaygroundError` unless the command reached its end, with the same bits, and no kill but ours failed
        it."""
        if self.code:
            last = self.notices[-1] if self.notices else "it said nothing"
            raise PlaygroundError(f"the command ended with exit code {self.code} after {len(self.kills)} kills: {last}")
        if self.unexplained:
            raise PlaygroundError(f"the command failed where no process was killed: {self.unexplained[0]}")
        if self.comparison:
            self.comparison.check()
