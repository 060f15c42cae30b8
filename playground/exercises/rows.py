"""The rows of a prediction: what a number that is wrong would be the answer to. Does not import
torch."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence

from playground.exercises.attempt import Attempt
from playground.exercises.exercise import Mistake
from playground.exercises.observation import Failure, Leaf, is_close

Row = tuple[object, ...]
"""The numbers that a prediction has under one name, of all cases."""
MULTIPLES = {2: "twice"}
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 8: "an eighth"}
LARGEST_RATIO = 64


def rows_of(made: Attempt, name: str) -> dict[str, Row]:
    """What is `held` or `expected` in the world, by the names of a prediction's numbers."""
    rows = dict[str, Row]()
    for _, observed in sorted(made.observed.items()):
        leaves: Sequence[Leaf] = getattr(observed[0], name)
        for leaf in leaves:
            row = re.split(r"\[", leaf.where)[0]
            rows[row] = (*rows.get(row, ()), *leaf.values)
    return rows


def is_same(one: Row | None, other: Row | None) -> bool:
    return (
        one is not None
        and other is not None
        and len(one) == len(other)
        and all(map(is_close, one, other))
    )


def find_wrong(made: Attempt) -> set[str]:
    """The names of the numbers that are wrong in one of the cases."""
    held, expected = (rows_of(made, each) for each in ("held", "expected"))
    return {row for row in expected if not is_same(held.get(row), expected[row])}


def find_same(one: Attempt, other: Attempt) -> set[str]:
    """The names of the numbers that are the same in two predictions, in all cases."""
    mine, theirs = (rows_of(each, "held") for each in (one, other))
    return {row for row in mine if is_same(mine[row], theirs.get(row))}


def list_possible(made: Attempt, tried: Mapping[Mistake, Attempt]) -> list[Mistake]:
    """The mistakes that no number contradicts, which is right where the mistake makes it wrong."""
    right = {*rows_of(made, "expected")} - find_wrong(made)
    return [mistake for mistake, other in tried.items() if not right & find_wrong(other)]


def find_by_rows(made: Attempt, found: Failure, tried: Mapping[Mistake, Attempt]) -> list[Mistake]:
    """The possible mistakes that explain the number which is wrong first, and the most others; of
    these, those that make the fewest wrong in another way."""
    first = re.split(r"\[", found.where)[0]
    scores = {
        mistake: (len(same), -len(find_wrong(tried[mistake]) - same))
        for mistake in list_possible(made, tried)
        if first in (same := find_same(made, tried[mistake]))
    }
    best = max(scores.values(), default=None)
    return [mistake for mistake, score in scores.items() if score == best]


def tell_rows(
    made: Attempt, tried: Mapping[Mistake, Attempt], named: Container[str]
) -> Iterator[str]:
    """What each number that is wrong would be the answer to, if `named`, the mistakes of the
    verdict, do not explain it: a line for all of which the same is said."""
    held, expected = (rows_of(made, each) for each in ("held", "expected"))
    possible = list_possible(made, tried)
    explained = {
        row
        for mistake in possible
        if mistake.name in named
        for row in find_same(made, tried[mistake])
    }
    told: dict[str, list[str]] = {}
    for row in expected:
        if row not in find_wrong(made) - explained or row not in held:
            continue
        fitting = [
            each
            for each in possible
            if row in find_wrong(tried[each]) <= find_same(made, tried[each])
        ]
        if fitting:
            best = min(fitting, key=lambda each: len(find_wrong(tried[each])))
            words = f"probably: {best.name}{': ' if best.says else ''}{best.says}"
        else:
            words = describe_number(row, held[row], expected, made.size)
        if words:
            told.setdefault(words, []).append(row)
    for words, rows in told.items():
        yield f"{', '.join(rows)}: {words}"


def describe_number(row: str, mine: Row, expected: Mapping[str, Row], size: int) -> str:
    """What these numbers are: the answer to another question, or a part or a multiple of the right
    one in all cases; empty if they are neither. `size`: the number of ranks."""
    other = next((name for name in expected if is_same(mine, expected[name])), "")
    if other:
        return f"this is the answer to {other}"
    if sorted(map(str, mine)) == sorted(map(str, expected[row])):
        return "the right numbers, in another order"
    ratios = [
        each / right
        for each, right in zip(mine, expected[row], strict=False)
        if isinstance(each, (int, float)) and isinstance(right, (int, float)) and right > 0
    ]
    if len(ratios) < max(len(mine), len(expected[row])) or not 0 < ratios[0] < math.inf:
        return ""
    if not all(is_close(each, ratios[0]) for each in ratios):
        return ""
    ratio = ratios[0]
    times = round(max(ratio, 1 / ratio))
    if not 1 < times <= LARGEST_RATIO or not is_close(max(ratio, 1 / ratio), float(times)):
        return ""
    if ratio > 1:
        words = MULTIPLES.get(times, f"{times} times")
    else:
        words = f"{FRACTIONS.get(times, f'1/{times}')} of"
    return f"{words} what is counted{f', on {size} ranks' * (times == size)}"
