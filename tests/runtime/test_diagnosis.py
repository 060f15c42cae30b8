"""Diagnoses of a gallery of wrong programs, and of random ones, which an abstract gloo runs until it stands still."""

from __future__ import annotations

import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from playground.runtime.black_box import (
    BACKWARD,
    COLLECTIVE,
    DEAD,
    DONE,
    FINISHED,
    IN_OPERATION,
    IN_PROGRAM,
    ISSUED,
    NEW_GROUP,
    RECEIVE,
    SEND,
    STOPPED,
    Operation,
    RankState,
)
from playground.runtime.black_box.diagnosis import CURES, diagnose, find_mismatch

NAMES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "barrier", "scatter", "gather", "all_to_all")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor")


@dataclass(frozen=True)
class Step:
    """Of a program: it calls an operation, or waits for the one called at a line, or both."""

    call: Operation | None = None
    awaits: str = ""


Program = list[Step]


class AbstractGloo:
    """Runs a program per rank, a step of a rank at a time. A collective consists of the messages that gloo sends for
    it, each of which passes once both its ranks have called the operation; its other ranks may be far behind or ahead.
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
        self.waiting[rank] = next((one for one in self.called[rank] if one.line == step.awaits), None)
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
        return (one for one in self.called[rank] if one.kind == kind and (rank, one.line) not in self.passed)

    def may_end(self, rank: int, operation: Operation) -> bool:
        if operation.kind != COLLECTIVE:
            return (rank, operation.line) in self.passed
        _, targets = list_parts(rank, operation)
        return self.has_data(rank, operation) and all(self.meets(rank, one, operation, False) for one in targets)

    def has_data(self, rank: int, operation: Operation) -> bool:
        sources, _ = list_parts(rank, operation)
        return all(self.meets(rank, one, operation, True) for one in sources)

    def meets(self, rank: int, other: int, mine: Operation, receives: bool) -> bool:
        """Whether a message of a collective passes between two ranks."""
        place = mine.channel, mine.index
        theirs = next((one for one in self.called[other] if (one.channel, one.index) == place), None)
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
    if root is None or operation.name == "reduce":  # which is a ring
        return others, others
    if operation.name == "broadcast":  # a binomial tree
        size, first = len(group), group.index(root)
        number = (group.index(rank) - first) % size
        level = number.bit_length()
        children = [number + 2**bit for bit in range(level, size) if number + 2**bit < size]
        parents = [number - 2 ** (level - 1)] if number else []
        return [group[(one + first) % size] for one in parents], [group[(one + first) % size] for one in children]
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


def list_groups(size: int) -> list[tuple[int, ...]]:
    world = tuple(range(size))
    return [world, world[:-1], world[1:]] if size > 2 else [world]


def collective(name: str, size: int = 2, **more: Any) -> Operation:
    """Of the first `size` ranks, unless `more` has another group, as also below."""
    group = tuple(range(size))
    return replace(Operation(kind=COLLECTIVE, name=name, index=0, group=group, dtype="float32"), **more)


def send(peer: int, size: int = 2, **more: Any) -> Operation:
    return replace(Operation(kind=SEND, name="send", index=0, group=tuple(range(size)), peer=peer), **more)


def receive(peer: int | None, size: int = 2, **more: Any) -> Operation:
    return replace(Operation(kind=RECEIVE, name="recv", index=0, group=tuple(range(size)), peer=peer), **more)


def write_programs(size: int, rng: random.Random) -> list[Program]:
    """Random programs that are right: there is an order of all operations that agrees with each rank's."""
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
            for rank in senders:  # with a tag of their own, so that no receive can take a message meant for a later one
                add(rank, send(receiver, group=group, tag=9 + number))
                add(receiver, receive(None, group=group, tag=9 + number), False)
        else:
            for rank in groups[0]:
                add(rank, collective(NEW_GROUP, size), False)
    return [program + waits for program, waits in zip(programs, awaited, strict=True)]


def run(*programs: Sequence[Operation]) -> list[RankState]:
    """What ranks do where they stand still after these calls, the first of which is in line 1."""
    steps = []
    for calls in programs:
        lines = [f"train.py:{number} in step" for number, _ in enumerate(calls, 1)]
        steps.append([Step(replace(call, line=line), line) for call, line in zip(calls, lines, strict=True)])
    gloo = AbstractGloo(steps)
    for _ in stand_still(gloo, random.Random(0)):
        pass
    return gloo.states()


SUM, BARRIER = collective("all_reduce"), collective("barrier")
ROOT_0, ROOT_1 = collective("broadcast", peer=0), collective("broadcast", peer=1)
SUM_3, BARRIER_3, GROUP_3 = (collective(name, 3) for name in ("all_reduce", "barrier", NEW_GROUP))
SUM_4, BARRIER_4, BACKWARD_4, GROUP_4 = (collective(name, 4) for name in ("all_reduce", "barrier", BACKWARD, NEW_GROUP))


@pytest.mark.parametrize(
    ("programs", "kind", "culprits", "sentence"),
    [
        ([[SUM, ROOT_0], [ROOT_0, SUM]], "different collectives", (0, 1),
         "rank 0 is in all_reduce (train.py:1) where rank 1 is in broadcast (:1)"),
        ([[SUM_3, SUM_3], [SUM_3, BARRIER_3], [SUM_3, SUM_3]], "different collectives", (1,),
         "rank 1 is in barrier (train.py:2) where ranks 0, 2 are in all_reduce (:2)"),
        ([[BACKWARD_4], [BACKWARD_4], [SUM_4], [BACKWARD_4]], "different collectives", (2,),
         "rank 2 is in all_reduce (train.py:1) where ranks 0-1, 3 are in DDP's backward (:1)"),
        ([[ROOT_0], [ROOT_1]], "different roots", (0, 1),
         "rank 0 is in broadcast from rank 0 (train.py:1) where rank 1 is in broadcast from rank 1 (:1)"),
        ([[replace(SUM, shape=(4, 2))], [replace(SUM, shape=(4, 3))]], "different shapes", (0, 1),
         "rank 0 is in all_reduce of shape [4, 2] (train.py:1) where rank 1 is in all_reduce of shape [4, 3] (:1)"),
        ([[SUM_3], [SUM_3], [replace(SUM_3, dtype="float64")]], "different dtypes", (2,),
         "rank 2 is in all_reduce of float64 (train.py:1) where ranks 0-1 are in all_reduce of float32 (:1)"),
        ([[SUM_3], [SUM_3], [collective("all_reduce", group=(1, 2))]], "different groups", (1, 2),
         "rank 2 is in all_reduce of the group 1-2 (train.py:1) "
         "where ranks 0-1 are in all_reduce of the group 0-2 (:1)"),
        ([[GROUP_4, SUM_4], [GROUP_4, SUM_4], [SUM_4], [SUM_4]], "a group not made by all", (2, 3),
         "ranks 2-3 are in all_reduce (train.py:1) where ranks 0-1 are in new_group (:1)"),
        ([[GROUP_3, SUM_3], [GROUP_3], [SUM_3, GROUP_3]], "a group not made by all", (2,),
         "rank 2 is in all_reduce (train.py:1) where ranks 0-1 are in new_group (:1)"),
        ([[SUM, SUM], [SUM]], "a rank that has finished", (1,),
         "rank 1 has finished (train.py:1) where rank 0 is in all_reduce (:2)"),
        ([[SUM_4] * 3, [SUM_4] * 2, [SUM_4] * 3, [SUM_4] * 2], "a rank that has finished", (1, 3),
         "ranks 1, 3 have finished (train.py:2) where ranks 0, 2 are in all_reduce (:3)"),
        ([[SUM_3], [SUM_3], [receive(0, 3), SUM_3]], "a rank that does not take part", (0, 2),
         "rank 2 is in recv from rank 0 (train.py:1) where ranks 0-1 are in all_reduce (:1)"),
        ([[send(1), receive(1)], [send(0), receive(0)]], "send against send", (0, 1),
         "rank 0 is in send to rank 1 (train.py:1) where rank 1 is in send to rank 0 (:1)"),
        ([[receive(1), send(1)], [receive(0), send(0)]], "receive against receive", (0, 1),
         "rank 0 is in recv from rank 1 (train.py:1) where rank 1 is in recv from rank 0 (:1)"),
        ([[send((rank + 1) % 3, 3)] for rank in range(3)], "send against send", (0, 1, 2),
         "rank 0 is in send to rank 1 (train.py:1) where rank 2 is in send to rank 0 (:1)"),
        ([[send(1, tag=5)], [receive(0, tag=6)]], "wrong tag", (0, 1),
         "rank 0 is in send to rank 1 with tag 5 (train.py:1) where rank 1 is in recv from rank 0 with tag 6 (:1)"),
        ([[send(2, 3), SUM_3], [receive(0, 3), SUM_3], [SUM_3]], "wrong peer", (0, 2),
         "rank 0 is in send to rank 2 (train.py:1) where rank 1 is in recv from rank 0 (:1)"),
        ([[SUM_3], [replace(BARRIER_3, raised="ValueError: no")], [SUM_3]], "a collective in `finally`", (1,),
         "rank 1 is in barrier (train.py:1) where ranks 0, 2 are in all_reduce (:1)"),
        ([[receive(None, 3), SUM_3], [SUM_3], [SUM_3]], "a rank that does not take part", (0, 1, 2),
         "rank 0 is in recv from anyone (train.py:1) where ranks 1-2 are in all_reduce (:1)"),
    ],
)  # fmt: skip
def test_the_gallery_is_told_apart(
    programs: list[list[Operation]], kind: str, culprits: tuple[int, ...], sentence: str
) -> None:
    states = run(*programs)
    found = diagnose(states)
    assert found
    assert (found.kind, found.culprits, found.proved) == (kind, culprits, True)
    assert found.sentence == textwrap.fill(f"deadlock: {sentence}", 80)
    assert found.line.startswith("train.py:")
    assert found.cure == CURES[kind]
    assert max(map(len, str(found).splitlines())) <= 100


@pytest.mark.parametrize(
    ("changed", "kind", "sentence"),
    [
        ({"doing": IN_PROGRAM, "line": "train.py:20 in main"}, "straggler",
         "rank 2 is in the program (train.py:20) while ranks 0-1 are in all_reduce (:1)"),
        ({"doing": STOPPED, "line": "train.py:20 in main"}, "stopped",
         "rank 2 is stopped (train.py:20) while ranks 0-1 are in all_reduce (:1)"),
        ({"doing": DEAD, "end": "was killed by SIGKILL"}, "dead",
         "rank 2 was killed by SIGKILL while ranks 0-1 are in all_reduce (train.py:1)"),
        ({"has_other_threads": True}, "a rank that does not take part",
         "rank 2 is in recv from rank 0 (train.py:1) while ranks 0-1 are in all_reduce\n(:1)"),
    ],
)  # fmt: skip
def test_nothing_is_proved_while_a_rank_may_act(changed: dict[str, Any], kind: str, sentence: str) -> None:
    *others, last = run([SUM_3], [SUM_3], [receive(0, 3)])
    found = diagnose([*others, replace(last, **changed)])
    assert found
    assert (found.kind, 2 in found.culprits, found.proved, found.sentence) == (kind, True, False, sentence)


def test_an_operation_that_may_give_up_proves_nothing() -> None:
    found = diagnose(run([replace(SUM, may_give_up=True)], [receive(0)]))
    assert found
    assert (found.kind, found.culprits, found.proved) == ("a rank that does not take part", (0, 1), False)


def test_a_rank_that_is_not_seen_may_act() -> None:
    found = diagnose(run([SUM], [])[:1])
    assert found
    assert (found.kind, found.culprits, found.proved) == ("a rank that is not seen", (1,), False)


def test_functions_of_one_algorithm_meet() -> None:
    states = run([collective("all_gather")], [collective("all_gather_into_tensor")])
    states = [replace(state, doing=IN_OPERATION, waits_for=state.operations[0]) for state in states]
    found = diagnose(states)
    assert found
    assert (found.kind, found.proved) == ("in progress", False)


def test_what_all_have_called_is_in_progress() -> None:
    states = [replace(state, doing=IN_OPERATION, waits_for=state.operations[0]) for state in run([SUM], [SUM])]
    found = diagnose(states)
    assert found
    assert (found.kind, found.culprits, found.proved) == ("in progress", (), False)
    assert found.sentence == "ranks 0-1 are in all_reduce (train.py:1)"
    assert diagnose(run([SUM], [SUM])) is None


def test_ranks_that_do_the_same_share_a_row() -> None:
    name = collective("all_gather_into_tensor", 64)
    states = run([collective("barrier", 64)], [name, name], *[[name]] * 62)
    states = [replace(state, since=state.rank / 10) for state in states]
    found = diagnose(states)
    assert found
    assert found.table.splitlines() == [
        "rank  does                       since  where               waits for",
        "0     barrier #0                 0.0 s  train.py:1 in step  1-63",
        "1-63  all_gather_into_tensor #0  6.3 s  train.py:1 in step  0",
    ]


def test_a_table_is_no_wider_than_a_terminal() -> None:
    line = "a_program_with_a_very_long_name.py:1234 in a_function_with_a_very_long_name"
    everyone = tuple(range(64))
    states = [
        RankState(
            rank=rank,
            doing=IN_OPERATION,
            waits_for=(
                call := collective(("barrier", "all_gather_into_tensor")[rank % 2], 64, index=123456, line=line)
            ),
            operations=(call,),
            counts={call.channel: call.index + 1},
            since=12345.6,
        )
        for rank in everyone
    ]
    found = diagnose(states)
    assert found
    assert found.culprits == everyone
    assert max(map(len, str(found).splitlines())) <= 80
    assert found.sentence.startswith("deadlock: ranks 0, 2, 4, 6, 8, … are in barrier (")
    assert all("e.py:1234  " in row for row in found.table.splitlines()[1:])


@pytest.mark.parametrize(
    ("calls", "kind", "culprits", "sentence"),
    [
        ([SUM_3, SUM_3, replace(SUM_3, dtype="int32")], "different dtypes", (2,),
         "rank 2 has called all_reduce of int32 (train.py:1) where ranks 0-1 have called all_reduce of float32 (:1)"),
        ([collective("broadcast", 3, peer=root) for root in (0, 0, 1)], "different roots", (2,),
         "rank 2 has called broadcast from rank 1 (train.py:1) where ranks 0-1 have called broadcast from rank 0 (:1)"),
        ([replace(SUM_3, shape=shape) for shape in ((2, 3), (3, 2), (3, 2))], "different shapes", (0,),
         "rank 0 has called all_reduce of shape [2, 3] (train.py:1) "
         "where ranks 1-2 have called all_reduce of shape [3, 2] (:1)"),
        ([send(1, 3, shape=(4,), dtype="float32"), receive(0, 3, shape=(3,), dtype="float32"), BARRIER_3],
         "different sizes", (0, 1),
         "rank 0 has called send to rank 1 of float32[4] (train.py:1) "
         "where rank 1 has called recv from rank 0 of float32[3] (:1)"),
    ],
)  # fmt: skip
def test_silent_differences_are_found(
    calls: list[Operation], kind: str, culprits: tuple[int, ...], sentence: str
) -> None:
    states = run(*[[call] for call in calls])
    found = find_mismatch(states)
    assert found
    assert (found.kind, found.culprits, found.proved) == (kind, culprits, False)
    assert found.sentence == textwrap.fill(sentence, 80)
    assert found.line == "train.py:1 in step"
    assert "waits" not in found.table.splitlines()[1]


def test_the_first_difference_is_told() -> None:
    wrong = replace(SUM, dtype="int32")
    states = run([SUM, SUM, BARRIER], [SUM, wrong, wrong])
    timed = [
        replace(state, operations=tuple(replace(one, issued=float(one.index)) for one in state.operations))
        for state in states
    ]
    found = find_mismatch(timed)
    assert found
    assert (found.kind, found.line) == ("different dtypes", "train.py:2 in step")


def look_at_right_programs(number: int, share: float, rng: random.Random) -> int:
    """Run so many random programs, and look at this share of the moments; return how many there were."""
    looks = 0
    for _ in range(number):
        gloo = AbstractGloo(write_programs(rng.randint(2, 5), rng))
        for _ in stand_still(gloo, rng):
            if rng.random() < share:
                states = gloo.states()
                found = diagnose(states)
                assert found is None or (found.kind in ("straggler", "in progress") and not found.proved), str(found)
                rank = rng.choice(gloo.ranks)
                states[rank] = replace(states[rank], doing=rng.choice((STOPPED, DEAD)), waits_for=None)
                found = diagnose(states)
                assert found is not None
                assert not found.proved
                looks += 1
        assert {state.doing for state in gloo.states()} == {FINISHED}
        assert find_mismatch(gloo.states()) is None
    return looks


def test_right_programs_are_never_in_a_deadlock() -> None:
    assert look_at_right_programs(1000, 0.1, random.Random(0)) > 2000


@pytest.mark.stress
def test_many_right_programs_are_never_in_a_deadlock() -> None:
    assert look_at_right_programs(5000, 0.5, random.Random(1)) > 50_000


def mutate(program: Program, how: str, rank: int, size: int, rng: random.Random) -> tuple[Operation, Program] | None:
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
                wrong = replace(call, peer=rng.choice([one for one in call.group if one != call.peer]))
            case "peer" if call.kind != COLLECTIVE and call.peer is not None and others:
                wrong = replace(call, peer=rng.choice(others))
            case "tag" if call.kind != COLLECTIVE and call.peer is not None:
                wrong = replace(call, tag=5)
            case "branch" if moves_data:
                wrong = replace(call, name="barrier" if call.name != "barrier" else "all_reduce", peer=None)
        if wrong:
            return call, [*program[:number], replace(step, call=wrong), *program[number + 1 :]]
    return None


def differ(one: Operation, other: Operation | None) -> bool:
    return other is None or replace(one, line="") != replace(other, line="")


CERTAIN = {
    "shape": "different shapes", "dtype": "different dtypes", "root": "different roots", "tag": "wrong tag",
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
    """The kinds of diagnoses for two ranks in these operations; None where one has finished. Which of these it is
    depends on what their programs do later."""
    if NEW_GROUP in {call.name for call in (one, other) if call}:
        return {"a group not made by all"}
    if one is None or other is None:
        return {"a rank that has finished"}
    if one.kind == other.kind == COLLECTIVE:
        return {*CALLS, "a rank that does not take part"}
    return {"a rank that does not take part"} if COLLECTIVE in (one.kind, other.kind) else MESSAGES


def test_wrong_programs_are_diagnosed() -> None:
    """At least 98 % of those that stand still get a kind that is right, and the culprit is named: in at least 90 %
    alone or with the other end of a wait, otherwise with all in a circle."""
    rng = random.Random(0)
    rates = {how: Counter[str]() for how in (*CERTAIN, "order", "group", "peer", "missing call")}
    for how, count in rates.items():
        while count["stands"] < 150:
            size = rng.randint(2, 5)
            rank, programs = rng.randrange(size), write_programs(size, rng)
            mutated = mutate(programs[rank], how, rank, size, rng)
            if mutated is None:
                continue
            missed, wrong = mutated
            index = [step.call for step in programs[rank] if step.call and step.call.channel == missed.channel].index(
                missed
            )
            programs[rank] = wrong
            gloo = AbstractGloo(programs)
            for _ in stand_still(gloo, rng):
                pass
            states = gloo.states()
            if {state.doing for state in states} == {FINISHED}:  # nobody notices: the calls agree by chance
                continue
            found = diagnose(states)
            assert found
            mine = states[rank].waits_for
            kinds = {CERTAIN[how]} if how in CERTAIN else list_kinds(missed, mine)
            known = [one for one in states[rank].operations if (one.channel, one.index) == (missed.channel, index)]
            if missed.kind == COLLECTIVE and any(differ(replace(missed, index=index), one) for one in known):
                kinds |= CALLS  # it called another one there
            if how == "peer":
                other = mine.peer if mine and mine.kind != COLLECTIVE else None
                kinds |= {"wrong peer"} | list_kinds(mine, None if other is None else states[other].waits_for)
            count.update(
                stands=1,
                kind=found.kind in kinds,
                culprit=rank in found.culprits,
                few=len(found.culprits) <= 2,
                proved=found.proved,
            )
    print("\n", "\n".join(f"{how}: {dict(count)}" for how, count in rates.items()))
    total = sum(rates.values(), Counter[str]())
    assert total["kind"] >= 0.98 * total["stands"]
    assert total["culprit"] >= 0.98 * total["stands"]
    assert total["few"] >= 0.9 * total["stands"]
    assert total["proved"] >= 0.95 * total["stands"]
