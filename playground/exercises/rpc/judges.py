"""Judges of the exercises on rpc."""

from __future__ import annotations

from collections.abc import Callable

from playground.exercises.cases import Case, Cases
from playground.ui.units import plural


def double(number: int) -> int:
    return 2 * number


def describe(number: int) -> str | None:
    return f"the number {number}" if number else None


def halve(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


FUNCTIONS: dict[str, Callable[[int], object]] = {
    each.__name__: each for each in (double, describe, halve)
}
NAMES = ("double", "halve", "describe", "nowhere")


def call(rank: int, size: int, seed: int) -> Cases:
    """Remote calls: values, errors, and names that rank 0 does not have."""
    for about, calls, names in (
        ("all return", [0, 2, 1, 0, 3], NAMES[:1]),
        ("some raise", [0, 3, 4, 2, 5], NAMES[:3]),
        ("some name no function", [0, 5, 0, 4, 4], NAMES),
    ):
        requests = [
            (names[(number + other) % len(names)], 10 * other + number)
            for other in (rank,)
            for number in range(calls[rank])
        ]
        answers = [answer(*request) for request in requests]
        given = (requests, calls[:size], FUNCTIONS if rank == 0 else {})
        yield Case(f"{plural(sum(calls[:size]), 'call')}, {about}", given, answers, is_coded=False)


def answer(name: str, argument: int) -> object:
    try:
        return FUNCTIONS[name](argument)
    except (KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
