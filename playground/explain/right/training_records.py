"""What is kept of a program's training between two looks at it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from playground.base.event_log import NONE
from playground.explain.right.log import Prints, is_looked_at

MOST_EVENTS = 256
"""How many events are remembered. Of an optimizer that steps more rarely, the events are not known
whole."""


@dataclass(eq=False, slots=True)
class Seen:
    """An event, as `Event` has it."""

    kind: str
    subject: str
    flag: bool = False
    note: str = ""
    gradients: frozenset[str] = frozenset()
    """The names of parameters whose gradients a call took."""
    parameters: frozenset[str] = frozenset()
    """Those of parameters that it took, or that were loaded."""
    size: int = 0
    ranks: int = 0
    line: int = NONE
    prints: Prints = field(default_factory=list)
    generator: int = 0
    values: list[float] = field(default_factory=list)


class Events:
    """The latest events, in their order."""

    def __init__(self) -> None:
        self.latest: deque[Seen] = deque(maxlen=MOST_EVENTS)
        self.count = 0
        """How many there were."""
        self.blind = 0
        """The number of the event after the last one that was not looked at."""

    def add(self, event: Seen, *, is_seen: bool) -> None:
        """`is_seen`: whether somebody looks at events now."""
        self.latest.append(event)
        self.count += 1
        if not is_seen:
            self.blind = self.count

    def miss(self) -> None:
        """From now on, calls are not told: the events until the next step are not whole."""
        self.count += 1
        self.blind = self.count

    def list_since(self, number: int) -> list[Seen]:
        """The events from this number on, of those that are kept."""
        dropped = self.count - len(self.latest)
        return [*self.latest][max(0, number - dropped) :]

    def are_whole_since(self, number: int) -> bool:
        """Whether all events from this number on are kept, and were looked at."""
        return self.count - number <= MOST_EVENTS and self.blind <= number


@dataclass(eq=False, slots=True)
class Pending:
    """A look whose step is under way."""

    before: Prints
    gradients: Prints
    values: list[list[float]]
    settings: list[list[str]]
    events: list[tuple[object, ...]]
    is_whole: bool
    line: int
    trains: bool
    gradient_values: list[list[float]]
    shards: Prints
    gradients_of_shards: Prints


@dataclass(eq=False, slots=True)
class Stepping:
    """What is known of an optimizer."""

    number: int
    group: ReferenceType[Any] | None
    """The group whose clock its steps have: its first wrapped model's, or the world."""
    models: int
    """How many models had been wrapped by then."""
    count: int = 0
    """How many steps it has made."""
    clock: int = -1
    nth: int = 0
    since: int = 0
    """The number of the first event after its last step."""
    is_forced: bool = False
    """Whether its next step is looked at, whatever its number."""
    is_nesting: bool = False
    """Whether another optimizer steps within its step, or backward runs there."""
    values: list[float] = field(default_factory=list)
    """Two elements of its first parameter after its last step."""
    written: int = 0
    """How often they were others before the next step."""
    raw: Prints = field(default_factory=list)
    raw_values: list[list[float]] = field(default_factory=list)
    norms: list[tuple[int, ReferenceType[Any]]] = field(default_factory=list)
    """Its BatchNorm layers whose statistics nobody broadcasts, each behind the number of its weight
    among the parameters."""
    rates: list[float] = field(default_factory=list)
    """The learning rates of its last step, if they are plain numbers."""
    changed: int = -1
    """The number of the last step that had others than the one before."""
    changes: int = 0
    """How many changes were told."""
    pending: Pending | None = None
    depth: int = 0
    """How many backward passes its step is in."""
    has_trained: bool = False
    """Whether a parameter of it had a gradient at a step."""

    @property
    def is_next_looked_at(self) -> bool:
        return self.is_forced or is_looked_at(self.count)


@dataclass(eq=False, slots=True)
class Wrapped:
    """What is known of a model that DistributedDataParallel has wrapped."""

    model: ReferenceType[Any]
    key: str
    group: ReferenceType[Any]
    ignored: set[str]
