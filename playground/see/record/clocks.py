"""The clocks of ranks on several hosts, put onto that of rank 0. Does not import torch.

On one host all processes read the same clock. On another it shows something else, and runs a little faster or slower:
so the ranks compare their clocks when the recording begins and when it ends, and in between the difference is taken to
change evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 1e-4
"""By how much two clocks may differ in speed, where that has not been measured: quartz stays below it."""


@dataclass(frozen=True)
class ClockSample:
    """One comparison with rank 0's clock, in nanoseconds."""

    at: int
    """When, on this rank's clock."""
    offset: int
    """What rank 0's clock shows more than this one."""
    bound: int
    """By how much `offset` may be off: half of the shortest round trip."""


@dataclass(frozen=True)
class Clock:
    """A rank's clock, and what is known of it."""

    samples: tuple[ClockSample, ...] = ()
    is_shared: bool = True
    """Whether it is the very clock that rank 0 reads. Then there is nothing to correct, whatever a comparison says."""

    def to_rank_0(self, time: int) -> float:
        """A time on this clock, in nanoseconds on rank 0's."""
        if self.is_shared or not self.samples:
            return time
        first, last = self.samples[0], self.samples[-1]
        slope = (last.offset - first.offset) / (last.at - first.at) if last.at > first.at else 0.0
        return time + first.offset + slope * (time - first.at)

    def bound(self, end: int) -> float:
        """Nanoseconds by which a time may be off, of a recording that lasts until `end` on this clock."""
        bound = max((sample.bound for sample in self.samples), default=0)
        if self.is_shared or len(self.samples) > 1:
            return bound
        return bound + DRIFT * max((end - sample.at for sample in self.samples), default=0)
