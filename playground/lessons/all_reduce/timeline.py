"""Ranks have no clock in common: which of their messages belong to the same step?

A rank's messages follow each other, and nothing arrives before it was sent: each one's step is the earliest that obeys
both.
Source: Lamport: Time, Clocks, and the Ordering of Events in a Distributed System (1978)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

Start = tuple[Sequence[int], Sequence[int]]
"""Messages started together: the ranks they go to, and the ranks that others come from."""


def timeline(ranks: Sequence[Sequence[Start]]) -> list[dict[int, int]]:
    """For each step, which of its starts each rank was at: {rank: position}. `ranks`: every rank's starts, in order."""
    left_at: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # (from, to): steps, in the order of the messages
    to_do = [deque(enumerate(starts)) for starts in ranks]
    clock, has_sent = [0] * len(ranks), [False] * len(ranks)
    steps: dict[int, dict[int, int]] = defaultdict(dict)
    while any(to_do):
        for rank, starts in enumerate(to_do):
            if not starts:
                continue
            position, (sends, receives) = starts[0]
            if not has_sent[rank]:
                has_sent[rank] = True
                for to in sends:
                    left_at[rank, to].append(clock[rank])
            lines = [left_at[source, rank] for source in receives]
            if all(lines):
                step = max([clock[rank], *(line.popleft() for line in lines)])
                steps[step][rank] = position
                clock[rank], has_sent[rank] = step + 1, False
                starts.popleft()
    return [steps[step] for step in sorted(steps)]
