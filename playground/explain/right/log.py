"""The log that each rank writes. Does not import torch."""

from __future__ import annotations

import struct

from playground.base.event_log import Format

STATE, FULL, RACES = range(3)
"""The log's words: how the program ended, whether there was no room for all that was seen, and how
many waits were missing on simulated GPUs."""
RUNNING, ENDED, FAILED = range(3)
"""Values of `STATE`."""
STEP = struct.Struct("<qqq")
"""A step of an optimizer: the optimizer's number, its clock, and the mark."""
FORMAT = Format(
    title=b"plgright", record=STEP, mark=struct.Struct("<16xq"), capacity=2**15, words=3,
    text=2**21,
)  # fmt: skip
LINE, OPTIMIZER, MODEL, LATE, LOOK, FINAL = (
    "line", "optimizer", "model", "late", "look", "final",
)  # fmt: skip
DRAW, BATCH, SHARES, SAMPLES, FILE, MISUSE, THREADS, MESSAGES, UNKNOWN = (
    "draw", "batch", "shares", "samples", "file", "misuse", "threads", "messages", "unknown",
)  # fmt: skip
LAYOUT, RESTORED, OVERWRITTEN, UNOWNED = "layout", "restored", "overwritten", "unowned"
RATES, CALLS = "rates", "calls"
"""Subjects of the lines of a log's text."""
FIRST_STEPS, PERIOD = 12, 512
"""The first steps of each optimizer are looked at; then those whose number is a power of two; from
`PERIOD` on, one of so many, or, if that is more, an eighth as many as the steps so far; and their
successors."""
LEAST_LOOKS, LEAST_COMPARED = 3, 2
"""In how many steps a rule must see something before it is told. Something may be so by intention
or by chance in a step that warms up and in the last of an epoch: three are more than these. That
values of several ranks differ while they add up or are averaged is no chance: a second step shows
that it stays so.
"""
LIMIT, LIMIT_OF_FAILED = 2.0, 0.5
"""Seconds for which rank 0 waits for the logs of ranks that end later, which others have started;
when its program has failed. One that waits for rank 0's process to end, as for the end of a stream,
waits as long."""
BETWEEN_LOOKS = 0.02
"""Seconds from one look whether it has ended to the next."""
NO_GRADIENT = 0
"""In the place of a gradient's fingerprint."""
Prints = list[int | None]
"""Fingerprints, one for each parameter of an optimizer; None is unknown."""


def file_name(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank-{rank}.right"


def is_looked_at(step: int) -> bool:
    """Whether the step of this number is looked at: 22 of 512 steps, 56 of 10,000. Pairs tell what
    a step has changed from what was changed after it."""
    if step < FIRST_STEPS or step & (step - 1) == 0 or (step - 1) & (step - 2) == 0:
        return True
    return step >= PERIOD and step % max(PERIOD, 1 << step.bit_length() - 4) < 2
