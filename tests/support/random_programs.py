"""Random programs of ranks, right ones and some with a mistake, and an abstract gloo that runs them
until it stands still.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from playground.explain.hang import COLLECTIVE, NEW_GROUP, RECEIVE, Doing, Operation, RankState
from playground.explain.hang.states import DONE, ISSUED, SEND

NAMES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "barrier",
    "scatter",
    "gather",
    "all_to_all",
)
ROOTED = ("broadcast", "reduce", "scatter", "gather")
EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor")


@dataclass(frozen=True)
class Step:
    """Of a program: it calls an operation, or waits for the one called at a line, or both."""

    call: Operation | None = None
    awaits: str = ""


Program = list[Step]


class AbstractGloo:
    """Runs a program per rank, a step of a rank at a time. A collective consists of the messages
    that gloo sends for it, each of which passes once both its ranks have called the operation; its
    other ranks may be far behind or ahead.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs, self.ranks = programs, range(len(programs))
        self.called: list[list[Operation]] = [[] for _ in self.ranks]
        self.waiting: list[Operation | None] = [None for _ in self.ranks]
        self.next = [0 for _ in self.ranks]
        self.passed: set[tuple[int, str]] = set()
        """Messages that have found their other part."""
        self.over: set[tuple[int, str]] = set()
        """Operations whose rank has noticed that they are over. Both by rank and line."""

    def move(self, rank: int) -> bool:
        """Let a rank do its next step, or end what it waits for; return whether it could."""
        waiting = self.waiting[rank]
        if waiting:
            if not self.may_end(rank, waiting):
                return False
            self.over.add((rank, waiting.line))
            self.waiting[rank] = None
            return True
        if self.next[rank] == len(self.programs[rank]):
            return False
        step = self.programs[rank][self.next[rank]]
        self.next[rank] += 1
        if step.call:
            index = sum(one.channel == step.call.channel for one in self.called[rank])
            self.called[rank].append(replace(step.call, index=index))
            self.pass_messages()
        self.waiting[rank] = next(
            (one for one in self.called[rank] if one.line == step.awaits), None
        )
        return True

    def pass_messages(self) -> None:
        """Give to each receive, in the order of the calls, the first send that fits."""
        for rank in self.ranks:
            for call in [*self.pending(rank, RECEIVE)]:
                key = rank, call.group, call.tag
                fits = (
                    (sender, one.line)
                    for sender in (call.group if call.peer is None else (call.peer,))
                    for one in self.pending(sender, SEND)
                    if (one.peer, one.group, one.tag) == key
                )
                if sent := next(fits, None):
                    self.passed |= {(rank, call.line), sent}

    def pending(self, rank: int, kind: str) -> Iterator[Operation]:
        return (
            one
            for one in self.called[rank]
            if one.kind == kind and (rank, one.line) not in self.passed
        )

    def may_end(self, rank: int, operation: Operation) -> bool:
        if operation.kind != COLLECTIVE:
            return (rank, operation.line) in self.passed
        _, targets = list_parts(rank, operation)
        return self.has_data(rank, operation) and all(
            self.meets(rank, one, operation, False) for one in targets
        )

    def has_data(self, rank: int, operation: Operation) -> bool:
        sources, _ = list_parts(rank, operation)
        return all(self.meets(rank, one, operation, True) for one in sources)

    def meets(self, rank: int, other: int, mine: Operation, receives: bool) -> bool:
        """Whether a message of a collective passes between two ranks."""
        place = mine.channel, mine.index
        theirs = next(
            (one for one in self.called[other] if (one.channel, one.index) == place), None
        )
        if theirs is None or theirs.name != mine.name:
            return False
        if mine.name in EQUAL_SHAPES and (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
            return False
        if rank not in list_parts(other, theirs)[1 if receives else 0]:
            return False
        forwards = receives and mine.name == "broadcast"
        return not forwards or self.has_data(other, theirs)

    def states(self) -> list[RankState]:
        return [self.state(rank) for rank in self.ranks]

    def state(self, rank: int) -> RankState:
        waiting, called = self.waiting[rank], self.called[rank]
        ended = self.next[rank] == len(self.programs[rank])
        known = [
            replace(one, state=DONE if (rank, one.line) in self.over else ISSUED) for one in called
        ]
        return RankState(
            rank=rank,
            doing=Doing.IN_OPERATION if waiting else Doing.FINISHED if ended else Doing.IN_PROGRAM,
            operations=tuple(known[-64:]),
            waits_for=waiting,
            counts=Counter(one.channel for one in called),
        )


def list_parts(rank: int, operation: Operation) -> tuple[list[int], list[int]]:
    """The ranks that a rank receives from, and those it sends to, in a collective of gloo."""
    group, root = operation.group, operation.peer
    others = [one for one in group if one != rank]
    if root is None or operation.name == "reduce":  # which is a ring
        return others, others
    if operation.name == "broadcast":  # a binomial tree
        size, first = len(group), group.index(root)
        number = (group.index(rank) - first) % size
        level = number.bit_length()
        children = [number + 2**bit for bit in range(level, size) if number + 2**bit < size]
        parents = [number - 2 ** (level - 1)] if number else []
        return [group[(one + first) % size] for one in parents], [
            group[(one + first) % size] for one in children
        ]
    sources, targets = ([], others) if rank == root else ([root], [])
    return (sources, targets) if operation.name == "scatter" else (targets, sources)


def stand_still(gloo: AbstractGloo, rng: random.Random) -> Iterator[None]:
    """Let random ranks move until none can, and stop after every step."""
    movable = list(gloo.ranks)
    while movable:
        rank = rng.choice(movable)
        if gloo.move(rank):
            movable = list(gloo.ranks)
            yield
        else:
            movable.remove(rank)


def run(*programs: Sequence[Operation]) -> list[RankState]:
    """What ranks do where they stand still after these calls, the first of which is in line 1."""
    steps = []
    for calls in programs:
        lines = [f"train.py:{number} in step" for number, _ in enumerate(calls, 1)]
        steps.append(
            [Step(replace(call, line=line), line) for call, line in zip(calls, lines, strict=True)]
        )
    gloo = AbstractGloo(steps)
    for _ in stand_still(gloo, random.Random(0)):
        pass
    return gloo.states()


def list_groups(size: int) -> list[tuple[int, ...]]:
    world = tuple(range(size))
    return [world, world[:-1], world[1:]] if size > 2 else [world]


def collective(name: str, size: int = 2, **more: Any) -> Operation:
    """Of the first `size` ranks, unless `more` has another group, as also below."""
    group = tuple(range(size))
    return replace(
        Operation(kind=COLLECTIVE, name=name, index=0, group=group, dtype="float32"), **more
    )


def send(peer: int, size: int = 2, **more: Any) -> Operation:
    return replace(
        Operation(kind=SEND, name="send", index=0, group=tuple(range(size)), peer=peer), **more
    )


def receive(peer: int | None, size: int = 2, **more: Any) -> Operation:
    return replace(
        Operation(kind=RECEIVE, name="recv", index=0, group=tuple(range(size)), peer=peer), **more
    )


def write_programs(size: int, rng: random.Random) -> list[Program]:
    """Random programs that are right: there is an order of all operations that agrees with each
    rank's."""
    programs: list[Program] = [[] for _ in range(size)]
    groups = list_groups(size)
    awaited: list[list[Step]] = [[] for _ in range(size)]

    def add(rank: int, operation: Operation, may_return: bool = True) -> None:
        line = f"train.py:{len(programs[rank]) + 1} in step"
        returns = may_return and rng.random() < 0.25
        programs[rank].append(Step(replace(operation, line=line), "" if returns else line))
        if returns:
            awaited[rank].append(Step(awaits=line))
        if awaited[rank] and rng.random() < 0.5:
            programs[rank].append(awaited[rank].pop(0))

    for number in range(rng.randint(2, 8)):
        group = rng.choice(groups)
        what = rng.random()
        if what < 0.5:
            name = rng.choice(NAMES)
            root = rng.choice(group) if name in ROOTED else None
            shape = () if name == "barrier" else (rng.randint(1, 4),)
            for rank in group:
                add(rank, collective(name, group=group, shape=shape, peer=root))
        elif what < 0.9:
            sender, receiver = rng.sample(group, 2)
            tag = rng.randint(0, 1)
            add(sender, send(receiver, group=group, tag=tag))
            add(receiver, receive(sender, group=group, tag=tag))
        elif what < 0.95:
            receiver, *senders = rng.sample(group, len(group))
            # with a tag of their own, so that no receive can take a message meant for a later one
            for rank in senders:
                add(rank, send(receiver, group=group, tag=9 + number))
                add(receiver, receive(None, group=group, tag=9 + number), False)
        else:
            for rank in groups[0]:
                add(rank, collective(NEW_GROUP, size), False)
    return [program + waits for program, waits in zip(programs, awaited, strict=True)]


def mutate(
    program: Program, how: str, rank: int, size: int, rng: random.Random
) -> tuple[Operation, Program] | None:
    """A call, and the program with one mistake there; None if it has no place for it."""
    blocking = [number for number, step in enumerate(program) if step.call and step.awaits]
    for number in rng.sample(range(len(program)), len(program)):
        step, call, wrong = program[number], program[number].call, None
        if call is None:
            continue
        moves_data = call.kind == COLLECTIVE and call.name != NEW_GROUP
        others = [one for one in call.group if one not in (call.peer, rank)]
        groups = [group for group in list_groups(size) if rank in group and group != call.group]
        later = [one for one in blocking if one > number and differ(call, program[one].call)]
        match how:
            case "missing call":
                return call, [one for one in program if one is not step and one.awaits != call.line]
            case "partial group" if call.name == NEW_GROUP:
                return call, [one for one in program if one is not step]
            case "order" if number in blocking and later:
                swapped = {number: program[later[0]], later[0]: step}
                return call, [swapped.get(place, one) for place, one in enumerate(program)]
            case "shape" if call.name in EQUAL_SHAPES:
                wrong = replace(call, shape=(7,))
            case "dtype" if call.name in EQUAL_SHAPES:
                wrong = replace(call, dtype="float64")
            case "group" if moves_data and call.peer is None and groups:
                wrong = replace(call, group=rng.choice(groups))
            case "root" if call.name in ROOTED:
                wrong = replace(
                    call, peer=rng.choice([one for one in call.group if one != call.peer])
                )
            case "peer" if call.kind != COLLECTIVE and call.peer is not None and others:
                wrong = replace(call, peer=rng.choice(others))
            case "tag" if call.kind != COLLECTIVE and call.peer is not None:
                wrong = replace(call, tag=5)
            case "branch" if moves_data:
                wrong = replace(
                    call, name="barrier" if call.name != "barrier" else "all_reduce", peer=None
                )
        if wrong:
            return call, [*program[:number], replace(step, call=wrong), *program[number + 1 :]]
    return None


def differ(one: Operation, other: Operation | None) -> bool:
    return other is None or replace(one, line="") != replace(other, line="")


CERTAIN = {
    "shape": "different shapes", "dtype": "different dtypes", "root": "different roots",
    "tag": "wrong tag",
    "branch": "different collectives", "partial group": "a group not made by all",
}  # fmt: skip
"""The kind of diagnosis of a mistake that has but one."""
CALLS = {"different collectives", "different roots", "different shapes", "different groups"}
MESSAGES = {
    "send against send",
    "receive against receive",
    "circular wait",
    "wrong tag",
    "wrong peer",
    "different groups",
}


def list_kinds(one: Operation | None, other: Operation | None) -> set[str]:
    """The kinds of diagnoses for two ranks in these operations; None where one has finished. Which
    of these it is depends on what their programs do later."""
    if NEW_GROUP in {call.name for call in (one, other) if call}:
        return {"a group not made by all"}
    if one is None or other is None:
        return {"a rank that has finished"}
    if one.kind == other.kind == COLLECTIVE:
        return {*CALLS, "a rank that does not take part"}
    return {"a rank that does not take part"} if COLLECTIVE in (one.kind, other.kind) else MESSAGES


MISTAKES = (*CERTAIN, "order", "group", "peer", "missing call")


@dataclass(frozen=True)
class Mistake:
    """Programs with one mistake, because of which the abstract gloo stands still."""

    how: str
    rank: int
    """Whose program it is in."""
    missed: Operation
    """What the others expect of that rank, with its index."""
    programs: list[Program]
    states: list[RankState]
    """What the ranks do in the end."""

    def list_right_kinds(self) -> set[str]:
        """The kinds of diagnoses that are right."""
        mine, missed = self.states[self.rank].waits_for, self.missed
        kinds = {CERTAIN[self.how]} if self.how in CERTAIN else list_kinds(missed, mine)
        place = missed.channel, missed.index
        known = [
            one for one in self.states[self.rank].operations if (one.channel, one.index) == place
        ]
        if missed.kind == COLLECTIVE and any(differ(missed, one) for one in known):
            kinds |= CALLS  # it called another one there
        if self.how == "order":  # others may wait for either of the two calls
            calls = (state.waits_for for state in self.states if state.rank != self.rank)
            kinds |= set[str]().union(
                *(list_kinds(one, mine) for one in calls if one and self.rank in one.group)
            )
        if self.how == "peer":
            other = mine.peer if mine and mine.kind != COLLECTIVE else None
            kinds |= {"wrong peer"} | list_kinds(
                mine, None if other is None else self.states[other].waits_for
            )
        return kinds


def make_mistake(how: str, size: int, rng: random.Random) -> Mistake | None:
    """Random programs with such a mistake; None if they have no place for it, or nobody notices
    it."""
    rank, programs = rng.randrange(size), write_programs(size, rng)
    if (mutated := mutate(programs[rank], how, rank, size, rng)) is None:
        return None
    missed, wrong = mutated
    same = [
        step.call for step in programs[rank] if step.call and step.call.channel == missed.channel
    ]
    programs[rank] = wrong
    gloo = AbstractGloo(programs)
    for _ in stand_still(gloo, rng):
        pass
    states = gloo.states()
    if {state.doing for state in states} == {Doing.FINISHED}:  # the calls agree by chance
        return None
    return Mistake(how, rank, replace(missed, index=same.index(missed)), programs, states)
