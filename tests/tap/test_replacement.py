"""Functions in the place of torch's: they come and go in any order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from playground.tap.replacement import replaced


def test_replacements_may_go_in_any_order() -> None:
    place = SimpleNamespace(add=lambda number: number)
    first = replaced(place, "add", lambda real: lambda number: real(number) * 10 + 1)
    second = replaced(place, "add", lambda real: lambda number: real(number) * 10 + 2)
    first.__enter__()
    second.__enter__()
    assert place.add(0) == 12
    first.__exit__(None, None, None)
    assert place.add(0) == 2
    second.__exit__(None, None, None)
    assert place.add(0) == 0


def test_the_last_to_come_leaves_those_before_it() -> None:
    place = SimpleNamespace(number=1)
    with replaced(place, "number", lambda real: real + 1):
        with replaced(place, "number", lambda real: real * 10):
            assert place.number == 20
        assert place.number == 2
    assert place.number == 1


def test_a_replacement_leaves_what_was_there_when_it_came() -> None:
    place = SimpleNamespace(number=1)
    for number in (1, 2):
        place.number = number
        with (
            contextlib.suppress(ZeroDivisionError),
            replaced(place, "number", lambda real: real * 10),
        ):
            assert place.number == number * 10
            raise ZeroDivisionError
        assert place.number == number


def test_a_replaced_method_of_a_base_class_is_inherited_again() -> None:
    class Base:
        def add(self, number: int) -> int:
            return number

    class Derived(Base):
        pass

    with replaced(Derived, "add", lambda real: lambda self, number: real(self, number) + 1):
        assert (Derived().add(1), Base().add(1)) == (2, 1)
    assert Derived().add(1) == 1
    assert "add" not in vars(Derived)
