"""What has probably gone wrong where no catalogued mistake does the same, by the looks of the first
failure. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from playground.base.ranks import name_ranks
from playground.exercises.exercise import AWAITS, RETURNED, Place
from playground.exercises.observation import (
    RESULT,
    Leaf,
    Observation,
    explain_digits,
    find_difference,
    is_close,
)

Wrong = Sequence[tuple[int, Leaf, Leaf]]
"""Rank, what it holds and what it should hold, of all that is wrong."""

ZEROS = "nothing is written there: it holds zeros"
SLIPS: dict[str, Callable[[float, int], float]] = {
    ZEROS: lambda due, size: 0,
    "counted twice": lambda due, size: 2 * due,
    "the wrong sign": lambda due, size: -due,
}
SLIPS_OF_FLOATS: dict[str, Callable[[float, int], float]] = {
    "the sum in place of the mean": lambda due, size: due * size,
    "divided by the number of ranks once too often": lambda due, size: due / size,
    "not a number: what is empty is divided, or exp() overflows": lambda due, size: math.nan,
}
"""What makes each wrong number of the one that is due, on so many ranks; of whole numbers there are
no means."""
UNTOUCHED = "nothing is written into the tensor: it holds what was given"
SIGNS = {
    r"no rank -?\d+ in a world": "a neighbour beyond the first or the last rank",
    r"Pair is not connected.*\[none\]": "a rank sends to itself, or receives from itself",
    r"[Ss]plit|same size|SIGABRT|size mismatch|must match|Check failed: \w*[Ss]hape": (
        "two tensors, or a slice and a tensor, differ in size"
    ),
    "storage of size 0": "a tensor is used whose memory has been freed",
    "NoneType": "a rank that has no value is not provided for",
    "out of (range|bounds)": "an index beyond the end, where a share is smaller or empty",
}
"""What the words of an error say of its cause."""
LEFT_OUT = "a share is left out"
SHARES = {
    "twice$": "a share is added twice",
    "in it, ": "a share of another rank in the place of one",
    "missing$": LEFT_OUT,
    "in it$": "a share of another rank is in it",
}
"""What is said of the digits of all that is wrong."""


def guess_by_words(words: str) -> str:
    """The likely cause of an error; empty if unknown."""
    return next((guess for sign, guess in SIGNS.items() if re.search(sign, words)), "")


def guess_by_places(at: Mapping[int, Place], size: int) -> str:
    """The likely cause of a deadlock; empty if unknown."""
    waiting = [at[rank] for rank in range(size) if at.get(rank, RETURNED) != RETURNED]
    names = [place.name for place in waiting]
    if not names:
        return ""
    if all("send" in name for name in names):
        return "all send first" if len(names) == size else "nobody receives what is sent"
    if all(name.startswith(AWAITS) for name in names):
        return "a key that nobody has written"
    if all("recv" in name for name in names):
        return "all receive first" if len(names) == size else "nobody sends what is waited for"
    if len(names) < size:
        return "a rank leaves out a call that the others make"
    return (
        "ranks wait in different calls" if len({*names}) > 1 else "ranks wait for different ranks"
    )


def guess_by_values(observed: Mapping[int, Observation]) -> str:
    """What explains all that is wrong in a case; empty if nothing does."""
    pairs = [
        (rank, *pair)
        for rank, seen in observed.items()
        for pair in zip(seen.held, seen.expected, strict=False)
    ]
    wrong = [(rank, mine, due) for rank, mine, due in pairs if find_difference([mine], [due])]
    if not wrong:
        return ""
    if all(mine.kind == "NoneType" for _, mine, _ in wrong):
        is_said = all(mine.where in ("", RESULT) for _, mine, _ in wrong)
        return "" if is_said else "nothing is left there"
    if any(mine.where != due.where for _, mine, due in wrong):
        return ""
    if kinds := {
        f"{mine.kind} in the place of {due.kind}" for _, mine, due in wrong if mine.kind != due.kind
    }:
        return kinds.pop() if len(kinds) == 1 else "values of other types"
    if more := [
        math.prod(mine.shape) - math.prod(due.shape)
        for _, mine, due in wrong
        if mine.shape != due.shape
    ]:
        return (
            "too many elements: padding is left in, or too much has come"
            if max(more) > 0
            else "elements are lost"
        )
    if all(any(is_same(mine, each) for each in observed[rank].given) for rank, mine, _ in wrong):
        return guess_by_messages(observed, wrong)
    if any(seen.is_shared for seen in observed.values()):
        return "one tensor for all: they are the same memory"
    numbers = guess_by_numbers(wrong, len(observed))
    if numbers == ZEROS and all(mine.kind in ("int", "float") for _, mine, _ in wrong):
        return describe_zeros(observed, {mine.where for _, mine, _ in wrong})
    return numbers or guess_by_order(wrong) or guess_by_shares(observed, wrong)


def guess_by_messages(observed: Mapping[int, Observation], wrong: Wrong) -> str:
    """Why ranks hold what they were given."""
    ranks = {rank for rank, _, _ in wrong}
    senders = {
        sender for rank in ranks for sender, number in enumerate(observed[rank].received) if number
    }
    if not senders or not all(mine.where.startswith(RESULT) for _, mine, _ in wrong):
        return UNTOUCHED
    if ranks & senders:
        return "what came is not returned: it returns what was given"
    had = "it had" if len(senders) == 1 else "they had"
    return f"its own values came back: {name_ranks(senders)} sent what {had} just received"


def guess_by_numbers(wrong: Wrong, size: int) -> str:
    numbers = [
        (mine.kind, value, due_value)
        for _, mine, due in wrong
        for value, due_value in zip(mine.values, due.values, strict=True)
        if isinstance(value, (int, float))
        and isinstance(due_value, (int, float))
        and not is_close(value, due_value)
    ]
    if not numbers:
        return ""
    is_whole = all(kind.startswith(("int", "uint")) for kind, _, _ in numbers)
    for name, slip in (SLIPS if is_whole else SLIPS_OF_FLOATS | SLIPS).items():
        if all(is_close(float(value), float(slip(due, size))) for _, value, due in numbers):
            return name
    if {kind for kind, _, _ in numbers} == {"int"} and {
        value - due for _, value, due in numbers
    } in ({1}, {-1}):
        return "one too many" if numbers[0][1] > numbers[0][2] else "one too few"
    return ""


def describe_zeros(observed: Mapping[int, Observation], places: set[str]) -> str:
    """Numbers of Python's that are 0 in these places, where ranks should have others."""
    everywhere = all(
        not any(each.values)
        for seen in observed.values()
        for each in seen.held
        if each.where in places
    )
    return "it is 0 on every rank" if everywhere else "it is 0 there"


def guess_by_order(wrong: Wrong) -> str:
    if all(
        mine.shape and sorted(map(str, mine.values)) == sorted(map(str, due.values))
        for _, mine, due in wrong
    ):
        return "the right values, in another order"
    held, expected = (
        sorted(f"{rank} {pair[place].values}" for rank, *pair in wrong if pair[place].kind != "str")
        for place in (0, 1)
    )
    return "the right results, in another order" if held and held == expected else ""


def guess_by_shares(observed: Mapping[int, Observation], wrong: Wrong) -> str:
    first = [find_difference([mine], [due]) for rank, mine, due in wrong if observed[rank].is_coded]
    said = [explain_digits(each.held, each.expected, len(observed)) for each in first if each]
    for sign, guess in SHARES.items():
        if said and all(re.search(sign, words) for words in said):
            is_moved = guess == LEFT_OUT and all(
                has_moved(mine, due, len(observed)) for _, mine, due in wrong
            )
            return "a share is in another place" if is_moved else guess
    return "each rank has a result of its own" if is_own_result(observed) else ""


def has_moved(mine: Leaf, due: Leaf, size: int) -> bool:
    """Whether each rank whose share is missing somewhere is in a place where it is not due."""
    missing, foreign = set[int](), set[int]()
    for pair in zip(mine.values, due.values, strict=True):
        numbers = [
            int(each) for each in pair if isinstance(each, int | float) and each == each // 1
        ]
        for rank in range(size * (len(numbers) == 2)):
            has, should = (number // 10**rank % 10 for number in numbers)
            if should and not has:
                missing.add(rank)
            elif has and not should:
                foreign.add(rank)
    return missing <= foreign


def is_own_result(observed: Mapping[int, Observation]) -> bool:
    """Whether the same is due on all ranks, and no two hold the same."""
    ranks = list(observed.values())
    if len(ranks) < 2 or any(
        find_difference(seen.expected, ranks[0].expected) for seen in ranks[1:]
    ):
        return False
    others = [(one, other) for place, one in enumerate(ranks) for other in ranks[:place]]
    return all(find_difference(one.held, other.held) for one, other in others)


def is_same(one: Leaf, other: Leaf) -> bool:
    """Whether they are the same, wherever each lies."""
    return not find_difference([replace(one, where="")], [replace(other, where="")])
