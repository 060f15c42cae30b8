"""What every rank did, and when, as lines of characters. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from playground.lessons.pipeline.results import Slot

FILL = {"F": "-", "B": "="}
"""What follows the name of a forward or backward as long as it takes."""
IDLE = "."


def draw(step: Sequence[Sequence[Slot]], width: int) -> list[str]:
    """A line of `width` characters for each rank, all on one scale: F0-- and B0== are the forward and the backward of
    microbatch 0, dots are idle time. What takes less than a character may not be seen."""
    slots = [slot for rank in step for slot in rank]
    first = min(slot.start for slot in slots)
    scale = width / (max(slot.end for slot in slots) - first)
    return [draw_rank(rank, first, scale, width) for rank in step]


def draw_rank(rank: Sequence[Slot], first: float, scale: float, width: int) -> str:
    line = IDLE * width
    for slot in rank:
        start, end = round((slot.start - first) * scale), round((slot.end - first) * scale)
        line = line[:start] + label(slot, end - start) + line[end:]
    return line


def label(slot: Slot, length: int) -> str:
    """The name of a slot, or of its kind where that does not fit, as long as the slot is."""
    name = f"{slot.kind}{slot.microbatch}"
    return (name if len(name) <= length else slot.kind).ljust(length, FILL[slot.kind])[:length]
