"""Events that are narrower than a pixel, drawn together: in the colour of what took most of the time there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from playground.see.record.recording import Event

STEP = 4
"""Pixels within which all are drawn as one."""
TOUCH = 1.0
"""Pixels between two that are drawn as one, at most."""


@dataclass
class Group:
    """Short events beside each other."""

    left: float
    right: float
    """Pixels."""
    events: list[Event] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By style."""

    @property
    def style(self) -> str:
        """What took most of the time; of several that took as much, the first by name."""
        return min(self.seconds, key=lambda style: (-self.seconds[style], style))

    def add(self, left: float, right: float, style: str, event: Event) -> None:
        self.left, self.right = min(left, self.left), max(right, self.right)
        self.events.append(event)
        self.seconds[style] += event.seconds


def group_short(short: Iterable[tuple[float, float, str, Event]]) -> list[Group]:
    """Of the events of one row, each with its left and right edge and its style: those that touch and look alike."""
    cells: dict[int, Group] = {}
    for left, right, style, event in short:
        cells.setdefault(int(left // STEP), Group(left, right)).add(left, right, style, event)
    groups: list[Group] = []
    for _, group in sorted(cells.items()):
        last = groups[-1] if groups else None
        if last and last.style == group.style and group.left <= last.right + TOUCH:
            last.right = max(last.right, group.right)
            last.events += group.events
            for style, seconds in group.seconds.items():
                last.seconds[style] += seconds
        else:
            groups.append(group)
    return groups
