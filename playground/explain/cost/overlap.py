"""Time that overlaps is counted once. Does not import torch."""

from __future__ import annotations

MOST = 64
"""How many intervals are remembered, the latest. Those that a new one overlaps are recent."""


class Covered:
    """Intervals of time that have been counted."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        """Begin and end of each. No two of them overlap."""

    def add(self, start: float, end: float) -> float:
        """Add an interval. Returns how many of its seconds no earlier one has."""
        if end <= start:
            return 0.0
        met = [each for each in self.intervals if each[0] <= end and each[1] >= start]
        begins, ends = zip((start, end), *met, strict=True)
        joined = min(begins), max(ends)
        apart = [each for each in self.intervals if each not in met]
        self.intervals = sorted([*apart, joined])[-MOST:]
        return joined[1] - joined[0] - sum(last - first for first, last in met)
