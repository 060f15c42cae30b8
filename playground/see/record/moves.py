"""What the event of a copy between two devices of one process is called. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

ARROW = " → "


class Move(NamedTuple):
    """A copy: which part of a training step made it, and the devices; `cpu` without a number is the host."""

    part: str
    source: str
    target: str


def name_of_move(part: str, source: str, target: str) -> str:
    """The event's name.

    >>> name_of_move("scatter", "cpu", "cpu:1")
    'scatter: cpu → cpu:1'
    """
    return f"{part}: {source}{ARROW}{target}"


def read_move(name: str) -> Move:
    """What an event of that name is.

    >>> read_move("scatter: cpu → cpu:1")
    Move(part='scatter', source='cpu', target='cpu:1')
    """
    part, _, devices = name.partition(": ")
    source, _, target = devices.partition(ARROW)
    return Move(part, source, target)
