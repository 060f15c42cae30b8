"""The only place that puts a function in the place of another module's: of torch's, above all.

Several may replace the same one, and take their functions away in any order: each calls the one that was put there
before it, and the last to go leaves the original itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Wrap = Callable[[Any], Any]
"""Makes the function that replaces the one it is given."""


@dataclass(eq=False, slots=True)
class Replacement:
    """A function in the place of the attribute `name` of a module or a class, from `install` to `remove`."""

    owner: Any
    name: str
    wrap: Wrap

    def install(self) -> Replacement:
        place = _places.get((id(self.owner), self.name))
        if place is None:
            place = _places[id(self.owner), self.name] = Place(vars(self.owner)[self.name], [])
        place.replacements.append(self)
        setattr(self.owner, self.name, self.wrap(getattr(self.owner, self.name)))
        return self

    def remove(self) -> None:
        place = _places[id(self.owner), self.name]
        place.replacements.remove(self)
        setattr(self.owner, self.name, place.original)
        if not place.replacements:
            del _places[id(self.owner), self.name]
        for each in place.replacements:
            setattr(self.owner, self.name, each.wrap(getattr(self.owner, self.name)))


@dataclass(slots=True)
class Place:
    """An attribute that is replaced: what it was, as its class has it, and the replacements, the outermost last."""

    original: Any
    replacements: list[Replacement]


_places: dict[tuple[int, str], Place] = {}


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """In this block, `owner.name` is `wrap(owner.name)`."""
    replacement = Replacement(owner, name, wrap).install()
    try:
        yield
    finally:
        replacement.remove()
