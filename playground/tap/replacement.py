"""The only place that puts a function in the place of another module's: of torch's, above all.

Several may replace the same one, and take their functions away in any order: each calls the one
that was put there before it, and the last to go leaves the original itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

INHERITED = object()
"""In the place of an attribute that a class has from another."""
Wrap = Callable[[Any], Any]
"""Makes the function that replaces the one it is given."""


def calling(stand_in: Callable[..., Any]) -> Wrap:
    """What replaces a function `real` calls `stand_in(real, *args, **kwargs)`."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def function(*args: Any, **kwargs: Any) -> Any:
            return stand_in(real, *args, **kwargs)

        return function

    return wrap


@dataclass(eq=False, slots=True)
class Replacement:
    """A function in the place of the attribute `name` of a module or a class, from `install` to
    `remove`."""

    owner: Any
    name: str
    wrap: Wrap

    def install(self) -> Replacement:
        key = id(self.owner), self.name
        own = Layer(None, vars(self.owner).get(self.name, INHERITED))
        stack = _stacks.setdefault(key, [own])
        self.put_on(stack)
        return self

    def put_on(self, stack: Stack) -> None:
        function = self.wrap(getattr(self.owner, self.name))
        stack.append(Layer(self, function))
        setattr(self.owner, self.name, function)

    def remove(self) -> None:
        stack = _stacks[id(self.owner), self.name]
        at = [layer.replacement for layer in stack].index(self)
        above = stack[at + 1 :]
        del stack[at:]
        if stack[-1].function is INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, stack[-1].function)
        for layer in above:
            assert layer.replacement
            layer.replacement.put_on(stack)
        if len(stack) == 1:
            del _stacks[id(self.owner), self.name]


class Layer(NamedTuple):
    """What an attribute is, with the replacements below."""

    replacement: Replacement | None
    """None of the attribute as its class has it."""
    function: Any


Stack = list[Layer]
"""The layers of an attribute, the outermost last."""
_stacks: dict[tuple[int, str], Stack] = {}


def original(owner: Any, name: str) -> Any:
    """The attribute of a class or a module as it is without any replacement."""
    stack = _stacks.get((id(owner), name))
    return stack[0].function if stack else vars(owner)[name]


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """In this block, `owner.name` is `wrap(owner.name)`."""
    replacement = Replacement(owner, name, wrap).install()
    try:
        yield
    finally:
        replacement.remove()
