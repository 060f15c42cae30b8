"""What became of a training that was killed again and again. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from playground.runtime.errors import PlaygroundError
from playground.training.snapshots.comparison import Comparison

NO_RANKS, STARTING, LOADING, TRAINING, SAVING, ENDING = PHASES = (
    "no ranks", "starting", "loading", "training", "saving", "ending",
)  # fmt: skip
"""What a run was doing: no rank is there, or none yet; the ranks have not written a snapshot since they were started;
they are reading one; none of the others, so training or testing; writing one; the last one is written."""


@dataclass(kw_only=True)
class Kill:
    """A process that was killed, and what came of it."""

    role: str
    pid: int
    at: float
    """Seconds since the run was started."""
    phase: str
    step: int
    """Of the newest whole snapshot then; 0 if there was none."""
    said: str = ""
    """What the command said of the failure. Nothing, if its launcher was killed, or where the next kill came so soon
    that one failure was told for several."""
    seconds: float | None = None
    """Until the next snapshot was whole that ranks started after the kill have written; None if none was to come."""


@dataclass(kw_only=True)
class RunRecord:
    """One run of the command, from its first start to its end, however often it was started."""

    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    """How often the command was started: once, and after each kill of its launcher."""
    unexplained: list[str] = field(default_factory=list)
    """Failures that the command told and no kill had caused."""
    notices: list[str] = field(default_factory=list)
    """What else it said on stderr: which snapshots were passed over, for example."""
    code: int = 0
    """The exit code of its last start."""
    seconds: float = 0.0
    """Until its end."""
    ranks_after: float = 0.0
    """Seconds until there was a rank."""
    first_snapshot_after: float = 0.0
    """Seconds until the first snapshot was whole."""
    last_step: int = 0
    """Of the newest whole snapshot."""
    comparison: Comparison | None = None
    """Its end, against that of the run that nobody disturbed; None if it did not come to one."""

    def check(self) -> None:
        """Raise `PlaygroundError` unless the command came to its end, with the same bits, and without other failures
        than those it was dealt."""
        if self.code:
            last = self.notices[-1] if self.notices else "it said nothing"
            raise PlaygroundError(f"the command ended with exit code {self.code} after {len(self.kills)} kills: {last}")
        if self.unexplained:
            raise PlaygroundError(f"the command failed where nobody was killed: {self.unexplained[0]}")
        if self.comparison:
            self.comparison.check()
