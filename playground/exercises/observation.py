"""A rank's actions in one case, and the first that is wrong. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from playground.base.ranks import name_ranks
from playground.exercises.exercise import FAIL
from playground.ui.units import plural

POISON = -7777
"""In every element of a tensor into which a message is being received."""
SENDS_TOO_MUCH = "sends more than it must"
OWN = "its own tensor"
"""The place of a tensor that stays as it is, where the task says so."""
RESULT = "result"
"""The place of what a function returned, unless that is a dictionary; its second item is
result[1]."""

ITEM = re.compile(rf"{RESULT}\[(\d+)\](?:\[(\d+)\])?")


class Message(NamedTuple):
    """A message that a rank has sent."""

    receiver: int
    elements: int


class Problem(NamedTuple):
    """A rule of torch.distributed that was broken, or one of the task's."""

    rule: str
    words: str
    line: int = 0


@dataclass(frozen=True)
class Leaf:
    """A tensor, a number or a text in what a function returned or left."""

    where: str
    """Its place there: result, result[0] or weight; "" for the one tensor that a task changes."""
    kind: str
    """The tensor's dtype, or the name of a Python type."""
    shape: tuple[int, ...]
    values: tuple[object, ...]


@dataclass(frozen=True)
class Observation:
    """The actions of one rank in one case."""

    about: str
    """The case: its size and dtype, for example."""
    held: tuple[Leaf, ...]
    expected: tuple[Leaf, ...]
    is_coded: bool
    """Whether each digit of a value says how often that rank's share is in it."""
    sent: tuple[Message, ...]
    received: tuple[int, ...]
    """Number of messages received from each rank."""
    most: int | Mapping[int, float] | None
    """Elements that it may send in messages, in all or to each receiver."""
    moved: float
    """Elements that have left it, by messages and by collectives."""
    most_moved: float | None
    """Elements that may."""
    problems: tuple[Problem, ...]
    printed: str
    """The beginning of what it printed."""
    given: tuple[Leaf, ...] = ()
    """The tensors among its arguments, before the call."""
    names: tuple[str, ...] = ()
    """What the items of the result are called; empty: by their places."""
    is_shared: bool = False
    """Whether tensors of the list that it returned are the same memory."""
    culprit: int | None = None
    """The rank at fault in the program that the solution repairs."""
    notes: tuple[str, ...] = ()
    """Lines that are shown with the verdict."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is wrong in a world."""

    status: str = FAIL
    words: str = ""
    """The failure in one line, without its mistake."""
    digits: str = ""
    """What the digits of the value say, where each is a rank's share."""
    mistake: str = ""
    says: str = ""
    """The consequence of that mistake."""
    case: str = ""
    rank: int | None = None
    where: str = ""
    """The tensor or value that differs: result, result[1] or grad[0]; empty for the one tensor that
    a task changes."""
    index: int | None = None
    """Place of the first element that differs, in the flattened tensor."""
    shape: tuple[int, ...] = ()
    """The shape of that tensor."""
    held: object = None
    expected: object = None
    line: int = 0
    ranks: tuple[str, ...] = ()
    """Where each rank stands, if they wait for each other."""
    rows: tuple[str, ...] = ()
    """What the numbers of a prediction that are wrong would be the answers to, where that is
    known."""
    printed: str = ""
    """The solution's output in this case, on the rank that is named."""


def find_difference(held: Sequence[Leaf], expected: Sequence[Leaf]) -> Failure | None:
    """The first difference that is more than rounding."""
    for mine, due in zip(held, expected, strict=False):
        if (mine.where, mine.kind, mine.shape) != (due.where, due.kind, due.shape):
            return find_mismatch(mine, due, [leaf.where for leaf in held])
        for index, (value, wanted) in enumerate(zip(mine.values, due.values, strict=True)):
            if not is_close(value, wanted):
                words = f"holds {show(value)}, should be {show(wanted)}"
                if due.kind == "str" and not due.where.startswith(RESULT):  # what a judge says
                    words = f"{value}; expected: {wanted}"
                place = index if due.shape else None
                return Failure(
                    where=due.where,
                    index=place,
                    shape=due.shape,
                    held=value,
                    expected=wanted,
                    words=words,
                )
    missing = [each.where for each in expected[len(held) :]]
    if missing and not missing[0].startswith(RESULT):
        return Failure(where=missing[0], words="is missing")
    if len(held) != len(expected):
        words = f"{plural(len(held), 'value')}; expected {len(expected)}"
        return Failure(held=len(held), expected=len(expected), words=words)
    return None


def find_mismatch(mine: Leaf, due: Leaf, places: Sequence[str]) -> Failure:
    """Values of different types or shapes, or in different places, of which `places` are held."""
    where, found, wanted = due.where, describe(mine), describe(due)
    if mine.where != where:
        if mine.where in ("", RESULT) or mine.where.startswith("["):
            found = "a list or a tuple" if mine.where.startswith("[") else found
            is_item, name = where.startswith(f"{RESULT}["), where.partition("[")[0]
            where, wanted = RESULT, "a list or a tuple" if is_item else f"a dict with {name!r}"
        elif where.startswith(f"{mine.where}["):
            where, wanted = mine.where, "a list"
        elif any(place.startswith(f"{where}[") for place in places):
            found = "a list"
        elif where in places:
            words = "should not be there"
            return Failure(where=mine.where, held=found, expected="nothing", words=words)
        else:
            part = where.partition("[")[0]
            if not any(place.startswith(part) for place in places):
                where = part
            return Failure(where=where, words="is missing", expected=wanted)
    verb = "returned" if where == RESULT else "is"
    return Failure(
        where=where, held=found, expected=wanted, words=f"{verb} {found}; expected {wanted}"
    )


def is_close(value: object, wanted: object) -> bool:
    if isinstance(value, float) and isinstance(wanted, float):
        return math.isclose(value, wanted, rel_tol=1e-4, abs_tol=1e-6) or (
            math.isnan(value) and math.isnan(wanted)
        )
    return value == wanted


def describe(leaf: Leaf) -> str:
    """Its type, and the shape of a tensor."""
    if leaf.kind == "NoneType":
        return "None"
    article = "an" if leaf.kind[0] in "aeio" else "a"
    is_tensor = leaf.shape or leaf.kind[-1].isdigit()
    return f"{article} {leaf.kind}{f' tensor of shape {leaf.shape}' if is_tensor else ''}"


def show(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)[:60]


def explain_digits(held: object, expected: object, size: int) -> str:
    """Whose share is missing, or in it twice, where each digit is that of one of `size` ranks.
    Empty if that is not the difference."""
    values = [
        int(each)
        for each in (held, expected)
        if isinstance(each, (int, float)) and each == each // 1 >= 0
    ]
    if len(values) < 2 or max(values) >= 10**size:
        return ""
    pairs = dict(enumerate(zip(*(map(int, f"{value:020}"[::-1]) for value in values), strict=True)))
    wrong = {rank: pair for rank, pair in pairs.items() if pair[0] != pair[1]}
    missing, twice, foreign = (
        [rank for rank, pair in wrong.items() if rule(*pair)]
        for rule in (
            lambda has, due: not has,
            lambda has, due: due and has == 2 * due,
            lambda has, due: not due,
        )
    )
    if foreign and len(missing) + len(foreign) == len(wrong):
        others = f", {name_shares(missing)} is missing" if missing else ""
        return f"{name_shares(foreign)} is in it{others}"
    if missing == list(wrong):
        return f"{name_shares(missing)} is missing"
    return f"{name_shares(twice)} is in it twice" if twice == list(wrong) else ""


def name_shares(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)}'s share" if len(ranks) == 1 else f"what {name_ranks(ranks)} gave"


def find_failure(observed: Mapping[int, Observation], size: int) -> Failure | None:
    """The first failure in a case, observed by rank; None as long as one of `size` ranks is
    missing."""
    if len(observed) < size:
        return None
    for find in (find_problem, find_wrong_value, find_wrong_messages):
        for rank, seen in sorted(observed.items()):
            if found := find(seen, rank, observed):
                return replace(found, case=seen.about, rank=rank, printed=seen.printed)
    return None


def find_problem(
    seen: Observation, rank: int, observed: Mapping[int, Observation]
) -> Failure | None:
    """The first rule that this rank broke."""
    for problem in seen.problems[:1]:
        return Failure(mistake=problem.rule, words=problem.words, line=problem.line)
    return None


def find_wrong_value(
    seen: Observation, rank: int, observed: Mapping[int, Observation]
) -> Failure | None:
    """The first value of this rank that differs, with its name in the task, and what tells why."""
    found = find_difference(seen.held, seen.expected)
    if found is None:
        return None
    found = replace(found, where=name_place(found.where, seen.names))
    if found.held == POISON:
        found = replace(found, mistake="read before wait")
    elif found.where == OWN:
        found = replace(found, mistake="changes its own tensor")
    if seen.is_coded and found.where != OWN:
        found = replace(found, digits=explain_digits(found.held, found.expected, len(observed)))
    return found


def name_element(index: int, shape: Sequence[int]) -> str:
    """An element by its place: "element 3", or "element [1, 0]" of a matrix."""
    if len(shape) < 2:
        return f"element {index}"
    places = list[int]()
    for length in reversed(shape):
        index, place = divmod(index, length)
        places.insert(0, place)
    return f"element {places}"


def name_place(where: str, names: Sequence[str]) -> str:
    """The name of an item of the result, with the index of what differs in it, if it has one."""
    item = ITEM.fullmatch(where)
    if not (item and int(item[1]) < len(names)):
        return where
    index = f", index {item[2]}" if item[2] else ""
    return f"{names[int(item[1])]}{index}"


def find_wrong_messages(
    seen: Observation, rank: int, observed: Mapping[int, Observation]
) -> Failure | None:
    """The faults of the messages that this rank sent."""
    sent = count_elements(seen.sent)
    # a collective's part may be a fraction
    if seen.most_moved is not None and seen.moved > seen.most_moved + 0.5:
        words = (
            f"{plural(round(seen.moved), 'element')} have left it; {math.ceil(seen.most_moved)} "
            "are enough"
        )
        return Failure(mistake=SENDS_TOO_MUCH, words=words)
    if isinstance(seen.most, int) and (total := sum(sent.values())) > seen.most:
        words = f"sent {plural(total, 'element')}; {seen.most} are enough"
        return Failure(mistake=SENDS_TOO_MUCH, words=words)
    for receiver, elements in sent.items():
        if isinstance(seen.most, Mapping) and elements > (most := seen.most.get(receiver, 0)):
            words = (
                f"sent {plural(elements, 'element')} to rank {receiver}; {most or 'none'} are "
                "due there"
            )
            return Failure(mistake=SENDS_TOO_MUCH, words=words)
    for receiver, other in observed.items():
        if (has := count_messages(seen.sent, receiver)) != (got := other.received[rank]):
            words = f"sent {plural(has, 'message')} to rank {receiver}, which received {got}"
            return Failure(words=words)
    return None


def count_messages(messages: Sequence[Message], receiver: int) -> int:
    return sum(each.receiver == receiver for each in messages)


def count_elements(messages: Sequence[Message]) -> dict[int, int]:
    """The elements sent to each receiver, but for those that got none."""
    sent = dict[int, int]()
    for receiver, elements in sorted(messages):
        sent[receiver] = sent.get(receiver, 0) + elements
    return {receiver: elements for receiver, elements in sent.items() if elements}
