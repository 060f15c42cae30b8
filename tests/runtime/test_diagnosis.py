"""Diagnoses of states made by hand, and of those in which an abstract gloo stands still."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from playground.runtime.black_box import (
    AWAITED, BACKWARD, CALLED, COLLECTIVE, DEAD, DONE, FINISHED, IN_OPERATION, IN_PROGRAM, ISSUED, NEW_GROUP, RECEIVE,
    SEND, STOPPED, Operation, RankState,
)  # fmt: skip
from playground.runtime.black_box.diagnosis import Diagnosis, diagnose, find_mismatch


@dataclass(frozen=True)
class Step:
    """Of a program: it calls an operation, or waits for the one called at a line, or both."""

    call: Operation | None = None
    awaits: str = ""


Program = list[Step]


class AbstractGloo:
    """Runs a program per rank, a step of a rank at a time. A collective consists of the messages that gloo sends for it,
    each of which passes once both its ranks have called the operation; its other ranks may be far behind or ahead."""

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
        self.waiting[rank] = next((one for one in self.called[rank] if one.line == step.awaits), None)
        return True

    def pass_messages(self) -> None:
        """Give to each receive, in the order of the calls, the first send that fits."""
        for rank in self.ranks:
            for receive in self.pending(rank, RECEIVE):
                senders = receive.group if receive.peer is None else (receive.peer,)
                for sender in senders:
                    fits = (
                        send for send in self.pending(sender, SEND)
                        if (send.peer, send.group, send.tag) == (rank, receive.group, receive.tag)
                    )  # fmt: skip
                    if send := next(fits, None):
                        self.passed |= {(rank, receive.line), (sender, send.line)}
                        break

    def pending(self, rank: int, kind: str) -> Iterator[Operation]:
        return (one for one in self.called[rank] if one.kind == kind and (rank, one.line) not in self.passed)

    def may_end(self, rank: int, operation: Operation) -> bool:
        if operation.kind != COLLECTIVE:
            return (rank, operation.line) in self.passed
        sources, targets = list_parts(rank, operation)
        return self.has_data(rank, operation) and all(self.meets(rank, one, operation, False) for one in targets)

    def has_data(self, rank: int, operation: Operation) -> bool:
        sources, _ = list_parts(rank, operation)
        return all(self.meets(rank, one, operation, True) for one in sources)

    def meets(self, rank: int, other: int, mine: Operation, receives: bool) -> bool:
        """Whether a message of a collective passes between two ranks."""
        theirs = next((one for one in self.called[other] if (one.channel, one.index) == (mine.channel, mine.index)), None)
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
        known = [replace(one, state=DONE if (rank, one.line) in self.over else ISSUED) for one in called]
        return RankState(
            rank=rank,
            doing=IN_OPERATION if waiting else FINISHED if ended else IN_PROGRAM,
            operations=tuple(known[-64:]),
            waits_for=waiting,
            counts=Counter(one.channel for one in called),
        )


def list_parts(rank: int, operation: Operation) -> tuple[list[int], list[int]]:
    """The ranks that a rank receives from, and those it sends to, in a collective of gloo."""
    group, root = operation.group, operation.peer
    others = [one for one in group if one != rank]
    if operation.name == "broadcast" and root is not None:  # a binomial tree
        place, first = group.index(rank), group.index(root)
        number = (place - first) % len(group)
        low = number.bit_length()
        children = [number + 2**bit for bit in range(low, len(group)) if number + 2**bit < len(group)]
        parents = [number - 2 ** (low - 1)] if number else []
        return tuple([group[(one + first) % len(group)] for one in some] for some in (parents, children))  # type: ignore[return-value]
    if operation.name in ("scatter", "gather"):
        at_root, elsewhere = ([], others), ([root], [])
        pair = at_root if rank == root else elsewhere
        return pair if operation.name == "scatter" else pair[::-1]
    return others, others


def stand_still(programs: Sequence[Program], rng: random.Random) -> Iterator[AbstractGloo]:
    """The world after every step, until it stands still."""
    gloo = AbstractGloo(programs)
    movable = list(gloo.ranks)
    while movable:
        rank = rng.choice(movable)
        if gloo.move(rank):
            movable = list(gloo.ranks)
            yield gloo
        else:
            movable.remove(rank)


NAMES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "barrier", "scatter", "gather", "all_to_all")
ROOTED = ("broadcast", "reduce", "scatter", "gather")


def write_programs(size: int, rng: random.Random) -> list[Program]:
    """Random programs that are right: there is an order of all operations that agrees with each rank's."""
    programs: list[Program] = [[] for _ in range(size)]
    world = tuple(range(size))
    groups = [world, world[:-1], world[1:]] if size > 2 else [world]
    awaited: list[list[Step]] = [[] for _ in range(size)]

    def add(rank: int, operation: Operation, may_return: bool = True) -> None:
        line = f"train.py:{sum(map(bool, (step.call for step in programs[rank]))) + 1} in step"
        returns = may_return and rng.random() < 0.25
        programs[rank].append(Step(replace(operation, line=line), "" if returns else line))
        if returns:
            awaited[rank].append(Step(awaits=line))
        if awaited[rank] and rng.random() < 0.5:
            programs[rank].append(awaited[rank].pop(0))

    for _ in range(rng.randint(2, 8)):
        group = rng.choice(groups)
        what = rng.random()
        if what < 0.5:
            name = rng.choice(NAMES)
            root = rng.choice(group) if name in ROOTED else None
            shape = () if name == "barrier" else (rng.randint(1, 4),)
            for rank in group:
                add(rank, Operation(kind=COLLECTIVE, name=name, index=0, group=group, shape=shape, dtype="float32", peer=root))
        elif what < 0.9:
            sender, receiver = rng.sample(group, 2)
            tag = rng.randint(0, 1)
            add(sender, Operation(kind=SEND, name="send", index=0, group=group, peer=receiver, tag=tag))
            add(receiver, Operation(kind=RECEIVE, name="recv", index=0, group=group, peer=sender, tag=tag))
        elif what < 0.95:
            receiver, *senders = rng.sample(group, len(group))
            for rank in senders:
                add(rank, Operation(kind=SEND, name="send", index=0, group=group, peer=receiver, tag=9))
                add(receiver, Operation(kind=RECEIVE, name="recv", index=0, group=group, tag=9), False)
        else:
            for rank in world:
                add(rank, Operation(kind=COLLECTIVE, name=NEW_GROUP, index=0, group=world), False)
    return [program + waits for program, waits in zip(programs, awaited, strict=True)]


def test_right_programs_are_never_in_a_deadlock() -> None:
    rng = random.Random(0)
    looks = 0
    for _ in range(1500):
        programs = write_programs(rng.randint(2, 5), rng)
        for gloo in stand_still(programs, rng):
            found = diagnose(gloo.states())
            assert found is None or not found.proved, f"{programs}\n{found}"
            looks += 1
        assert [state.doing for state in gloo.states()] == [FINISHED] * len(programs)
    print(looks)


def mutate(program: Program, how: str, rank: int, size: int, rng: random.Random) -> Program | None:
    """One mistake of a rank; None if its program has no place for it."""
    calls = [number for number, step in enumerate(program) if step.call]
    rng.shuffle(calls)
    for number in calls:
        step, call = program[number], program[number].call
        assert call
        collective = call.kind == COLLECTIVE and call.name != NEW_GROUP
        others = [one for one in call.group if one not in (call.peer, rank)]
        wrong: Operation | None = None
        match how:
            case "missing call":
                return [one for one in program if one is not step and one.awaits != call.line]
            case "partial group" if call.name == NEW_GROUP:
                return program[:number] + program[number + 1 :]
            case "order":
                after = next((n for n in range(number + 1, len(program)) if program[n].call and program[n].awaits), None)
                if after and step.awaits and differ(call, program[after].call):
                    swapped = list(program)
                    swapped[number], swapped[after] = swapped[after], swapped[number]
                    return swapped
            case "shape" if collective and call.name in EQUAL_SHAPES:
                wrong = replace(call, shape=(7,))
            case "dtype" if collective and call.name in EQUAL_SHAPES:
                wrong = replace(call, dtype="float64")
            case "group" if collective and call.peer is None and size > 2:
                groups = [group for group in (tuple(range(size)), tuple(range(size - 1)), tuple(range(1, size)))
                          if rank in group and group != call.group]
                wrong = replace(call, group=rng.choice(groups))
            case "root" if call.name in ROOTED:
                wrong = replace(call, peer=rng.choice([one for one in call.group if one != call.peer]))
            case "peer" if call.kind != COLLECTIVE and call.peer is not None and others:
                wrong = replace(call, peer=rng.choice(others))
            case "tag" if call.kind != COLLECTIVE and call.peer is not None:
                wrong = replace(call, tag=5)
            case "branch" if collective:
                name = rng.choice([name for name in ("all_reduce", "barrier", "all_to_all") if name != call.name])
                wrong = replace(call, name=name, peer=None, shape=(), dtype="")
        if wrong:
            return [*program[:number], replace(step, call=wrong), *program[number + 1 :]]
    return None


def differ(one: Operation, other: Operation | None) -> bool:
    return other is None or replace(one, line="") != replace(other, line="")


def test_rates() -> None:
    rng = random.Random(1)
    table: dict[str, Counter[str]] = {}
    samples: dict = {}
    for turn in range(6000):
        size = rng.randint(2, 5)
        programs = write_programs(size, rng)
        how = rng.choice(HOW)
        rank = rng.randrange(size)
        wrong = mutate(programs[rank], how, rank, size, rng)
        if wrong is None:
            continue
        mutated = [wrong if one == rank else program for one, program in enumerate(programs)]
        for gloo in stand_still(mutated, rng):
            pass
        states = gloo.states()
        count = table.setdefault(how, Counter())
        if all(state.doing == FINISHED for state in states):
            count["works"] += 1
            continue
        found = diagnose(states)
        count["stands"] += 1
        count["proved"] += bool(found and found.proved)
        if found:
            count[found.kind] += 1
            n = len(found.culprits)
            c = "=" if found.culprits == (rank,) else "in2" if rank in found.culprits and n == 2 else "in" if rank in found.culprits else "MISS"
            if size == 2 and c == "in2": c = "tie"
            count["culprit " + c] += 1
            samples.setdefault((how, found.kind, c), []).append((programs, mutated, rank, found))
    for how, count in table.items():
        print(how, dict(count))
    import pickle; from pathlib import Path; Path("/tmp/samples.pkl").write_bytes(pickle.dumps(samples))


EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor")
HOW = ("order", "shape", "dtype", "group", "root", "peer", "tag", "branch", "missing call", "partial group")
