"""What has probably gone wrong where no catalogued mistake does the same, by the looks of the first
failure. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from playground.base.ranks import name_ranks
from playground.exercises.exercise import AWAITS, RETURNED, Place
from playground.exercises.observation import (
    OWN,
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
Slip = Callable[[float, int], float]
"""What makes each wrong number of the one that is due, on so many ranks."""
FIXED: dict[str, Slip] = {
    ZEROS: lambda due, size: 0,
    "not a number: what is empty is divided, or exp() overflows": lambda due, size: math.nan,
}
RATIOS: dict[str, Slip] = {
    "counted twice": lambda due, size: 2 * due,
    "the wrong sign": lambda due, size: -due,
}
RATIOS_OF_WHOLE: dict[str, Slip] = RATIOS | {
    "divided by the number of ranks": lambda due, size: due // size,
}
RATIOS_OF_FLOATS: dict[str, Slip] = {
    "the sum in place of the mean": lambda due, size: due * size,
    "divided by 2, and not by the number of ranks": (
        lambda due, size: math.nan if size in (2, 4) else due * size / 2
    ),
    "divided by the number of ranks once too often": lambda due, size: due / size,
} | RATIOS
"""A ratio is in all numbers, or it is none; of whole numbers there are no means."""
ONE_OFF = {1: "one too many", -1: "one too few"}
LEAST_OFF = 3
"""A number of which one too many or too few is told. Of a smaller one that may be chance, unless
several numbers are all one off."""
UNTOUCHED = "nothing is written into the tensor: it holds what was given"
SIGNS = {
    r"no rank -?\d+ in a world": "a neighbour beyond the first or the last rank",
    r"Pair is not connected.*\[none\]": "a rank sends to itself, or receives from itself",
    "tensors differ in": "",
    "Invalid process group": "this rank is not in the group that it uses",
    r"Global rank \d+ is not part": "src and dst are ranks of the world, also in a group",
    "SIGABRT": "two tensors that meet differ in size or dtype",
    r"[Ss]plit|same size|size mismatch|must match|Check failed: \w*[Ss]hape": (
        "two tensors, or a slice and a tensor, differ in size"
    ),
    "storage of size 0": "a tensor is used whose memory has been freed",
    "NoneType": "a value is None: it is not there yet, or this rank has none",
    "out of (range|bounds)": "an index beyond the end, where a share is smaller or empty",
}
"""What the words of an error say of its cause."""
NOT_SENT = "all ranks wait for messages that nobody has sent to them"
LEFT_OUT = "a share is left out"
SHARES = {
    "twice$": "a share is added twice",
    "in it, ": "one rank's values are where another rank's should be",
    "missing$": LEFT_OUT,
    "in it$": "a share of another rank is in it",
}
"""What is said of the digits of all that is wrong."""


def guess_by_words(words: str) -> str:
    """The likely cause of an error; empty if unknown."""
    return next((guess for sign, guess in SIGNS.items() if re.search(sign, words)), "")


def guess_by_places(at: Mapping[int, Place], size: int, are_first: bool = True) -> str:
    """The likely cause of a deadlock; empty if unknown. `are_first`: whether no rank has called
    anything before the call in which it waits."""
    waiting = [at[rank] for rank in range(size) if at.get(rank, RETURNED) != RETURNED]
    names = [place.name for place in waiting]
    if not names:
        return ""
    if all("send" in name for name in names):
        all_send = "all send first" if are_first else "all ranks wait in send, and none receives"
        return all_send if len(names) == size else "nobody receives what is sent"
    if all(name.startswith(AWAITS) for name in names):
        return "a key that nobody has written"
    if all("recv" in name for name in names):
        all_receive = "all receive first" if are_first else NOT_SENT
        return all_receive if len(names) == size else "nobody sends what is waited for"
    if len(names) < size:
        return guess_by_peers(at) or "a rank leaves out a call that the others make"
    return (
        "ranks wait in different calls" if len({*names}) > 1 else "ranks wait for different ranks"
    )


def guess_by_peers(at: Mapping[int, Place]) -> str:
    """That a message has no other end: the rank there has returned. Empty if there is none."""
    for rank, place in sorted(at.items()):
        if place.peer is not None and at.get(place.peer, RETURNED) == RETURNED:
            way = "sends to" if "send" in place.name else "waits for"
            back = "receive" if "send" in place.name else "send"
            return f"rank {rank} {way} rank {place.peer}, which does not {back}"
    return ""


def root_of_leaf(leaf: Leaf) -> str:
    """Where it is, without its place in a list: grad, of grad[1], and epoch 1, of epoch 1, sample
    0."""
    return re.split(r"\[|, ", leaf.where)[0]


def guess_by_prediction(observed: Mapping[int, Observation]) -> str:
    """What explains all numbers of a prediction that are wrong: of the guesses by values, those
    that are no sentences about ranks."""
    guess = guess_by_values(observed)
    return guess if guess in ONE_OFF.values() or " in the place of " in guess else ""


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
    # a tensor of its own that is wrong may come of what was returned, and not the other way
    wrong = [each for each in wrong if each[2].where != OWN] or wrong
    if any(mine.where != due.where for _, mine, due in wrong):
        return ""
    if kinds := {describe_kinds(mine, due) for _, mine, due in wrong if mine.kind != due.kind}:
        if any("NoneType" in kind for kind in kinds):  # which the failure says itself
            return ""
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
    numbers = guess_by_numbers(wrong, pairs, len(observed))
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


def guess_by_numbers(wrong: Wrong, pairs: Wrong, size: int) -> str:
    """What all wrong numbers have in common. `pairs`: what ranks hold and should hold, right or
    wrong."""
    numbers = [(value, due) for value, due in numbers_in(wrong) if not is_close(value, due)]
    if not numbers:
        return ""
    has_words = any(mine.kind == "str" for _, mine, _ in wrong)  # which say more than a ratio
    for name, slip in FIXED.items():
        if is_explained_by(slip, numbers, size) and not has_words:
            return name
    roots = {root_of_leaf(due) for _, _, due in wrong}
    alike = [*numbers_in([each for each in pairs if root_of_leaf(each[2]) in roots])]
    is_whole = all(mine.kind.startswith(("int", "uint")) for _, mine, _ in wrong)
    is_number = any(mine.kind == "int" for _, mine, _ in wrong)  # often of ranks, or of samples
    of_whole = RATIOS if is_number else RATIOS_OF_WHOLE
    for name, slip in (of_whole if is_whole else RATIOS_OF_FLOATS).items():
        if is_explained_by(slip, alike, size) and not has_words:
            return name
    differences = {value - due for value, due in numbers}
    if {mine.kind for _, mine, _ in wrong} - {"str"} == {"int"} and len(differences) == 1:
        is_large = all(due >= LEAST_OFF for _, due in numbers)
        is_row = len({due for _, due in numbers}) > 1 and {a - b for a, b in alike} == differences
        return ONE_OFF.get(int(differences.pop()), "") if is_large or is_row else ""
    return ""


def numbers_in(pairs: Wrong) -> Iterator[tuple[float, float]]:
    """What is held and what is due, of all numbers in these."""
    for _, mine, due in pairs:
        if due.kind == "bool":
            continue
        for value, due_value in zip(mine.values, due.values, strict=False):
            if isinstance(value, (int, float)) and isinstance(due_value, (int, float)):
                yield value, due_value


def is_explained_by(slip: Slip, numbers: Iterable[tuple[float, float]], size: int) -> bool:
    return all(is_close(float(value), float(slip(due, size))) for value, due in numbers)


def describe_kinds(mine: Leaf, due: Leaf) -> str:
    """A value of another type than the one that is due."""
    if mine.kind[-1].isdigit() and due.kind in ("int", "float"):
        return "a tensor in the place of a number: `.item()`"
    return f"{mine.kind} in the place of {due.kind}"


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
        return "the right values, in other places"
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
    if is_own_result(observed):
        return "each rank has a result of its own"
    right = {*observed} - {rank for rank, _, _ in wrong}
    due_leaves = next(iter(observed.values())).expected
    common = {due_leaves[place].where for place in find_common(observed)}
    is_due_on_all = all(due.where in common for _, _, due in wrong)
    return (
        f"only rank {right.pop()} has the right result" if len(right) == 1 and is_due_on_all else ""
    )


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
    """Whether all ranks are wrong where the same is due on all, and no two hold the same there."""
    common = find_common(observed)
    held, expected = (
        [[getattr(seen, name)[place] for place in common] for seen in observed.values()]
        for name in ("held", "expected")
    )
    if len(observed) < 2 or not all(map(find_difference, held, expected)):
        return False
    others = [(one, other) for place, one in enumerate(held) for other in held[:place]]
    return all(find_difference(one, other) for one, other in others)


def find_common(observed: Mapping[int, Observation]) -> list[int]:
    """The places in the results at which the same is due on all ranks."""
    ranks = observed.values()
    least = min(min(len(seen.held), len(seen.expected)) for seen in ranks)
    dues = [[seen.expected[place] for seen in ranks] for place in range(least)]
    return [
        place
        for place, (due, *others) in enumerate(dues)
        if not any(find_difference([due], [other]) for other in others)
    ]


def is_same(one: Leaf, other: Leaf) -> bool:
    """Whether they are the same, wherever each lies."""
    return not find_difference([replace(one, where="")], [replace(other, where="")])
