"""A function in the place of another, for a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """In this block, `owner.name` is what `wrap` makes of it."""
    with set_attribute(owner, name, wrap(getattr(owner, name))):
        yield


@contextlib.contextmanager
def set_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block, `owner.name` is `value`."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)
