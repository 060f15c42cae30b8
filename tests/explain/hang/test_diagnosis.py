"""Diagnoses of wrong programs, one of each kind, and of random ones, run on an abstract gloo until
it stands still."""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from random_programs import (
    MISTAKES,
    AbstractGloo,
    collective,
    make_mistake,
    receive,
    run,
    send,
    stand_still,
    write_programs,
)
from widths import too_wide

from playground.base.untrusted import unpickle
from playground.base.wrapping import PREFIX, wrap_sentence
from playground.explain.hang import NEW_GROUP, Doing, Kind, Operation, RankState
from playground.explain.hang.diagnosis import diagnose, explain_failure
from playground.explain.hang.differences import LISTS, find_mismatch
from playground.explain.hang.states import (
    AWAITED,
    BACKWARD,
    BUCKETS,
    BUFFERS,
    DONE,
    FORM_WORLD,
    FORWARDS,
    ISSUED,
    UNUSED,
    Channel,
)

UNPROVED = (Kind.STRAGGLER, Kind.RUNNING, Kind.UNWAITED, Kind.UNWAITED_RECEIVE)
SUM, BARRIER = collective("all_reduce"), collective("barrier")
ROOT_0, ROOT_1 = collective("broadcast", peer=0), collective("broadcast", peer=1)
SUM_3, BARRIER_3, GROUP_3 = (collective(name, 3) for name in ("all_reduce", "barrier", NEW_GROUP))
BACKWARD_3 = collective(BACKWARD, 3)
SUM_4, BARRIER_4, BACKWARD_4, GROUP_4 = (
    collective(name, 4) for name in ("all_reduce", "barrier", BACKWARD, NEW_GROUP)
)


@pytest.mark.parametrize(
    ("programs", "kind", "culprits", "sentence"),
    [
        ([[SUM, ROOT_0], [ROOT_0, SUM]], "different collectives", (0, 1),
         "rank 0 is in all_reduce (train.py:1) where rank 1 is in broadcast (:1)"),
        ([[SUM_3, SUM_3], [SUM_3, BARRIER_3], [SUM_3, SUM_3]], "different collectives", (1,),
         "rank 1 is in barrier (train.py:2) where ranks 0, 2 are in all_reduce (:2)"),
        ([[BACKWARD_4], [BACKWARD_4], [SUM_4], [BACKWARD_4]], "a collective that meets DDP's", (2,),
         "rank 2 is in all_reduce (train.py:1) where ranks 0-1, 3 are in DDP's backward (:1)"),
        ([[ROOT_0], [ROOT_1]], "different roots", (0, 1),
         "rank 0 is in broadcast from rank 0 (train.py:1) where rank 1 is in broadcast from rank 1 "
         "(:1)"),
        ([[replace(SUM, shape=(4, 2))], [replace(SUM, shape=(4, 3))]], "different shapes", (0, 1),
         "rank 0 is in all_reduce of shape [4, 2] (train.py:1) where rank 1 is in all_reduce of "
         "shape [4, 3] (:1)"),
        ([[SUM_3], [SUM_3], [replace(SUM_3, dtype="float64")]], "different dtypes", (2,),
         "rank 2 is in all_reduce of float64 (train.py:1) where ranks 0-1 are in all_reduce of "
         "float32 (:1)"),
        ([[SUM_3], [SUM_3], [collective("all_reduce", group=(1, 2), number=1)]], "different groups",
        (1, 2),
         "rank 2 is in all_reduce of group 1 (ranks 1-2) (train.py:1) "
         "where ranks 0-1 are in all_reduce of the default group (ranks 0-2) (:1)"),
        ([[GROUP_4, SUM_4], [GROUP_4, SUM_4], [SUM_4], [SUM_4]], "a group not made by all", (2, 3),
         "ranks 2-3 are in all_reduce (train.py:1) where ranks 0-1 are in new_group (:1)"),
        ([[GROUP_3, SUM_3], [GROUP_3], [SUM_3, GROUP_3]], "a group not made by all", (2,),
         "rank 2 is in all_reduce (train.py:1) where ranks 0-1 are in new_group (:1)"),
        ([[SUM, SUM], [SUM]], "a rank that has finished", (1,),
         "rank 1 has finished (last call: all_reduce, train.py:1) where rank 0 is in all_reduce "
         "(:2)"),
        ([[SUM_4] * 3, [SUM_4] * 2, [SUM_4] * 3, [SUM_4] * 2], "a rank that has finished", (1, 3),
         "ranks 1, 3 have finished (last call: all_reduce, train.py:2) where ranks 0, 2 are in "
         "all_reduce (:3)"),
        ([[SUM_3], [SUM_3], [receive(0, 3), SUM_3]], "a rank that does not take part", (0, 2),
         "rank 2 is in recv from rank 0 (train.py:1) where ranks 0-1 are in all_reduce (:1)"),
        ([[send(1), receive(1)], [send(0), receive(0)]], "send against send", (0, 1),
         "rank 0 is in send to rank 1 (train.py:1) where rank 1 is in send to rank 0 (:1)"),
        ([[receive(1), send(1)], [receive(0), send(0)]], "receive against receive", (0, 1),
         "rank 0 is in recv from rank 1 (train.py:1) where rank 1 is in recv from rank 0 (:1)"),
        ([[send((rank + 1) % 3, 3)] for rank in range(3)], "send against send", (0, 1, 2),
         "rank 0 is in send to rank 1 (train.py:1) where rank 2 is in send to rank 0 (:1)"),
        ([[send(1, tag=5)], [receive(0, tag=6)]], "wrong tag", (0, 1),
         "rank 0 is in send to rank 1 with tag 5 (train.py:1) where rank 1 is in recv from rank 0 "
         "with tag 6 (:1)"),
        ([[send(2, 3), SUM_3], [receive(0, 3), SUM_3], [SUM_3]], "wrong peer", (0, 2),
         "rank 0 is in send to rank 2 (train.py:1) where rank 1 is in recv from rank 0 (:1)"),
        ([[SUM_3], [replace(BARRIER_3, raised="ValueError: no")], [SUM_3]], "a collective in "
                                                                            "`finally`", (1,),
         "rank 1 is in barrier (train.py:1) where ranks 0, 2 are in all_reduce (:1)"),
        ([[receive(None, 3), SUM_3], [SUM_3], [SUM_3]], "a rank that does not take part", (0, 1, 2),
         "rank 0 is in recv from anyone (train.py:1) where ranks 1-2 are in all_reduce (:1)"),
    ],
)  # fmt: skip
def test_one_of_each_kind_is_told_apart(
    programs: list[list[Operation]], kind: str, culprits: tuple[int, ...], sentence: str
) -> None:
    states = run(*programs)
    found = diagnose(states)
    assert found
    assert (found.kind, found.culprits, found.proved) == (kind, culprits, True)
    assert found.sentence == wrap_sentence(f"deadlock: {sentence}")
    assert found.line.startswith("train.py:")
    if kind not in (Kind.ENDED, Kind.BESIDE_DDP):
        assert found.cure == found.kind.cure
    assert not too_wide(str(found), 80)


@pytest.mark.parametrize(
    ("changed", "kind", "sentence"),
    [
        ({"doing": Doing.IN_PROGRAM, "line": "train.py:20 in main"}, "straggler",
         "rank 2 is in the program (train.py:20) while ranks 0-1 are in all_reduce (:1)"),
        ({"doing": Doing.STOPPED, "line": "train.py:20 in main"}, "stopped",
         "rank 2 is stopped (train.py:20) while ranks 0-1 are in all_reduce (:1)"),
        ({"doing": Doing.DEAD, "end": "was killed by SIGKILL"}, "dead",
         "rank 2 was killed by SIGKILL while ranks 0-1 are in all_reduce (train.py:1)"),
        ({"may_act": "what thread Timer does"}, "a rank that does not take part",
         "probably a deadlock: rank 2 is in recv from rank 0 (train.py:1) where ranks 0-1\nare in "
         "all_reduce (:1)"),
        ({"moves": True}, "a rank that does not take part",
         "probably a deadlock: rank 2 is in recv from rank 0 (train.py:1) where ranks 0-1\nare in "
         "all_reduce (:1)"),
    ],
)  # fmt: skip
def test_nothing_is_proved_while_a_rank_may_act(
    changed: dict[str, Any], kind: str, sentence: str
) -> None:
    *others, last = run([SUM_3], [SUM_3], [receive(0, 3)])
    found = diagnose([*others, replace(last, **changed)])
    assert found
    said = " ".join(found.sentence.split())
    assert (found.kind, 2 in found.culprits, found.proved, said) == (
        kind,
        True,
        False,
        " ".join(sentence.split()),
    )


def test_nothing_is_proved_of_an_operation_that_a_stopped_rank_has_called() -> None:
    """When it is continued, what it sends may still arrive."""
    *others, last = run([SUM_3], [BARRIER_3], [SUM_3])
    found = diagnose([*others, last])
    assert found
    assert found.proved
    found = diagnose([*others, replace(last, doing=Doing.STOPPED, waits_for=None)])
    assert found
    assert (found.kind, found.culprits, found.proved) == ("different collectives", (1,), False)


def test_nothing_is_proved_of_a_world_that_others_may_join() -> None:
    """The rank forms it at another place than the launched one's: a process that it has started may
    be the other rank."""
    form = collective(FORM_WORLD)
    for place, proved in (("", True), ("127.0.0.1:29500", False)):
        found = diagnose(run([replace(form, dtype=place)], []))
        assert found
        assert (found.kind, found.proved) == (Kind.UNFORMED, proved)
        assert ("whether other processes join that world" in found.unknown) == (not proved)


def test_ranks_that_wait_for_one_that_is_blocked_have_a_say_in_whose_fault_it_is() -> None:
    """Though something else may act in them: it does not release that one."""
    most, wrong = (replace(SUM_3, shape=(length,)) for length in (4, 7))
    states = run([most], [wrong], [most])
    unknown = [replace(each, may_act="a thread" if each.rank != 1 else "") for each in states]
    found = diagnose(unknown)
    assert found
    assert (found.kind, found.culprits, found.proved) == (Kind.SHAPES, (1,), True)
    assert found.sentence == wrap_sentence(
        "deadlock: rank 1 is in all_reduce of shape [7] (train.py:1) where ranks 0, 2 are in "
        "all_reduce of shape [4] (:1)"
    )


def test_no_code_runs_that_a_stranger_has_written_to_the_store() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.getpid is not expected"):
        unpickle(b"cposix\ngetpid\n(tR.", RankState)


def test_what_all_ranks_do_after_an_exception_is_no_collective_in_finally() -> None:
    """It is a way to go on."""
    after = [replace(one, raised="RuntimeError") for one in (SUM, BARRIER)]
    found = diagnose(run(*([one] for one in after)))
    assert found
    assert (found.kind, found.proved) == (Kind.COLLECTIVES, True)


@pytest.mark.parametrize(
    ("awaited", "kind"),
    [
        (receive(0, tag=6), Kind.WRONG_TAG),
        (replace(receive(0, tag=5), number=1), Kind.GROUPS),
        (replace(receive(0, tag=6), number=1), Kind.ABSENT),
    ],
)
def test_a_message_that_was_sent_before_tells_what_is_wrong(awaited: Operation, kind: Kind) -> None:
    """The sender has gone on to a barrier."""
    sender = call((send(1, tag=5), 5), (BARRIER, 6), waits=True)
    found = diagnose([sender, call((awaited, 7), waits=True, rank=1)])
    assert found
    assert (found.kind, found.proved) == (kind, True)


def test_an_operation_that_may_give_up_proves_nothing() -> None:
    found = diagnose(run([replace(SUM, may_give_up=True)], [receive(0)]))
    assert found
    assert (found.kind, found.culprits, found.proved) == (
        "a rank that does not take part",
        (0, 1),
        False,
    )


def test_a_rank_that_is_not_seen_may_act() -> None:
    found = diagnose(run([SUM], [])[:1])
    assert found
    assert (found.kind, found.culprits, found.proved) == ("a rank that is not seen", (1,), False)


def test_of_late_ranks_the_one_that_has_been_away_longest_is_told() -> None:
    first, second, last = run([], [], [SUM_3])
    late = [
        replace(one, doing=Doing.IN_PROGRAM, line=f"train.py:2{one.rank} in main", since=since)
        for one, since in ((first, 1.0), (second, 9.0))
    ]
    found = diagnose([*late, last])
    assert found
    assert (found.kind, found.culprits, found.proved) == (Kind.STRAGGLER, (0, 1), False)
    assert found.sentence.startswith("rank 1 is in the program (train.py:21) while rank 2 is in")


def test_functions_of_one_algorithm_meet() -> None:
    states = run([collective("all_gather")], [collective("all_gather_into_tensor")])
    states = [
        replace(state, doing=Doing.IN_OPERATION, waits_for=state.operations[0]) for state in states
    ]
    found = diagnose(states)
    assert found
    assert (found.kind, found.proved) == ("in progress", False)


def test_what_all_have_called_is_in_progress() -> None:
    states = [
        replace(state, doing=Doing.IN_OPERATION, waits_for=state.operations[0])
        for state in run([SUM], [SUM])
    ]
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
            doing=Doing.IN_OPERATION,
            waits_for=(
                call := collective(
                    ("barrier", "all_gather_into_tensor")[rank % 2], 64, index=123456, line=line
                )
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
    assert too_wide(str(found)) == []
    assert found.sentence.startswith("deadlock: ranks 0, 2, 4, 6, 8, … are in barrier\n(")
    assert all("e.py:1234  " in row for row in found.table.splitlines()[1:])


@pytest.mark.parametrize(
    ("calls", "kind", "culprits", "sentence"),
    [
        ([SUM_3, SUM_3, replace(SUM_3, dtype="int32")], "different dtypes", (2,),
         "rank 2 has called all_reduce of int32 (train.py:1) where ranks 0-1 have called "
         "all_reduce of float32 (:1)"),
        ([collective("broadcast", 3, peer=root) for root in (0, 0, 1)], "different roots", (2,),
         "rank 2 has called broadcast from rank 1 (train.py:1) where ranks 0-1 have called "
         "broadcast from rank 0 (:1)"),
        ([replace(SUM_3, shape=shape) for shape in ((2, 3), (3, 2), (3, 2))], "different shapes",
        (0,),
         "rank 0 has called all_reduce of shape [2, 3] (train.py:1) "
         "where ranks 1-2 have called all_reduce of shape [3, 2] (:1)"),
        ([send(1, 3, shape=(4,), dtype="float32"), receive(0, 3, shape=(3,), dtype="float32"),
        BARRIER_3],
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
    assert found.sentence == wrap_sentence(sentence)
    assert found.line == "train.py:1 in step"
    assert "waits" not in found.table.splitlines()[1]


def test_the_first_difference_is_told() -> None:
    wrong = replace(SUM_2, dtype="int32")
    right = call((SUM_2, 1), (SUM_2, 2), (BARRIER, 3))
    found = find_mismatch([right, call((SUM_2, 1), (wrong, 2), (wrong, 3), rank=1)])
    assert found
    assert (found.kind, found.line) == ("different dtypes", "train.py:2 in step")


def test_what_need_not_be_equal_is_no_difference() -> None:
    group = collective(NEW_GROUP)
    assert (
        find_mismatch(run([replace(group, members=(0,))], [replace(group, members=(1,))])) is None
    )
    long, short = ({"shape": (length,), "dtype": "float32"} for length in (4, 3))
    # the first took the first message from rank 1
    receives = [receive(None, 3, **short), receive(1, 3, **long)]
    assert find_mismatch(run(receives, [send(0, 3, **short), send(0, 3, **long)], [])) is None


def look_at_right_programs(number: int, share: float, rng: random.Random) -> int:
    """Run so many random programs, and look at this share of the moments; return how many there
    were."""
    looks = 0
    for _ in range(number):
        gloo = AbstractGloo(write_programs(rng.randint(2, 5), rng))
        for _ in stand_still(gloo, rng):
            if rng.random() < share:
                states = gloo.states()
                found = diagnose(states)
                assert found is None or (found.kind in UNPROVED and not found.proved), str(found)
                rank = rng.choice(gloo.ranks)
                states[rank] = replace(
                    states[rank], doing=rng.choice((Doing.STOPPED, Doing.DEAD)), waits_for=None
                )
                found = diagnose(states)
                assert found is not None
                assert not found.proved
                looks += 1
        assert {state.doing for state in gloo.states()} == {Doing.FINISHED}
        assert find_mismatch(gloo.states()) is None
    return looks


def test_right_programs_are_never_in_a_deadlock() -> None:
    assert look_at_right_programs(300, 0.1, random.Random(0)) > 600


@pytest.mark.stress
def test_many_right_programs_are_never_in_a_deadlock() -> None:
    assert look_at_right_programs(5000, 0.5, random.Random(1)) > 50_000


def test_wrong_programs_are_diagnosed() -> None:
    """At least 98 % of those that stand still get a kind that is right, and the culprit is named:
    in at least 90 % alone or with the other end of a wait, otherwise with all in a circle."""
    rng = random.Random(0)
    rates = {how: Counter[str]() for how in MISTAKES}
    for how, count in rates.items():
        while count["stands"] < 50:
            if (mistake := make_mistake(how, rng.randint(2, 5), rng)) is None:
                continue
            found = diagnose(mistake.states)
            assert found
            count.update(
                stands=1,
                kind=found.kind in mistake.list_right_kinds(),
                culprit=mistake.rank in found.culprits,
                few=len(found.culprits) <= 2,
                proved=found.proved,
            )
    print("\n", "\n".join(f"{how}: {dict(count)}" for how, count in rates.items()))
    total = sum(rates.values(), Counter[str]())
    assert total["kind"] >= 0.98 * total["stands"]
    assert total["culprit"] >= 0.98 * total["stands"]
    assert total["few"] >= 0.9 * total["stands"]
    assert total["proved"] >= 0.95 * total["stands"]


# --- where the calls of ranks first differ ---

SUM_2, BACKWARD_2, FORWARD_2 = (collective(name) for name in ("all_reduce", BACKWARD, BUFFERS))
BARRIER_2 = collective("barrier")


def call(*calls: tuple[Operation, int], waits: bool = False, rank: int = 0) -> RankState:
    """A rank that has called these, each in a line of this number; `waits`: and is in the last."""
    counts: Counter[Any] = Counter()
    operations = []
    for number, (one, line) in enumerate(calls):
        operations.append(
            replace(one, index=counts[one.channel], line=f"train.py:{line} in step", issued=number)
        )
        counts[one.channel] += 1
    return RankState(
        rank=rank,
        doing=Doing.IN_OPERATION if waits else Doing.FINISHED,
        operations=tuple(operations),
        waits_for=operations[-1] if waits else None,
        counts=counts,
    )


STEP = (FORWARD_2, 41), (BACKWARD_2, 42)
SKIPPED = "rank 1 has called DDP's backward (train.py:42), which rank 0 has not"


@pytest.mark.parametrize(
    ("first", "second", "kind", "told"),
    [
        ([*STEP, (SUM_2, 50)], [*STEP, *STEP], Kind.BESIDE_DDP,
         "rank 0 has called all_reduce (train.py:50) where rank 1 has called DDP's forward (:41)"),
        ([*STEP, (FORWARD_2, 46), *STEP], [*STEP, *STEP, (SUM_2, 50)], Kind.ALONE,
         "rank 0 has called DDP's forward (train.py:46), which rank 1 has not"),
        ([*STEP, (FORWARD_2, 46), (FORWARD_2, 46), *STEP], [*STEP, *STEP], Kind.ALONE,
         "rank 0 has called DDP's forward and 1 more (train.py:46), which rank 1 has not"),
        ([*STEP, (FORWARD_2, 41), *STEP], [*STEP, *STEP, *STEP], Kind.SKIPPED, SKIPPED),
        ([*STEP, (SUM_2, 45), *STEP], [*STEP, *STEP], Kind.ABSENT,
         "rank 0 has called all_reduce (train.py:45), which rank 1 has not"),
        ([(replace(BACKWARD_2, tag=1), 42)], [(replace(BACKWARD_2, tag=2), 43)], Kind.MODELS,
         "rank 0 has called DDP's backward of model 1 (train.py:42) where rank 1 has called "
         "DDP's backward of model 2 (:43)"),
    ],
)  # fmt: skip
def test_what_gloo_has_mixed_is_told_by_the_first_difference(
    first: list[tuple[Operation, int]], second: list[tuple[Operation, int]], kind: Kind, told: str
) -> None:
    found = find_mismatch([call(*first), call(*second, rank=1)])
    assert found
    assert (found.kind, found.sentence) == (kind, wrap_sentence(told))
    assert (found.cure == kind.cure) == (kind != Kind.BESIDE_DDP)


@pytest.mark.parametrize("forgotten", range(5))
def test_the_place_of_a_call_is_known_although_earlier_ones_are_not(forgotten: int) -> None:
    """The ring holds the latest calls of a rank, and of another one more."""
    states = [
        call(*STEP, *STEP, *STEP, (SUM_2, 45), *STEP), call(*STEP, *STEP, *STEP, *STEP, rank=1)
    ]  # fmt: skip
    states[0] = replace(states[0], operations=states[0].operations[forgotten:])
    found = find_mismatch(states)
    assert found
    assert found.sentence.startswith("rank 0 has called all_reduce (train.py:45)")


def test_a_message_with_a_rank_that_has_finished_has_a_cure_of_messages() -> None:
    for call_, peer in ((receive(0, 2), 0), (send(0, 2), 0)):
        found = diagnose(run([], [call_]))
        assert found
        assert found.kind == Kind.ENDED
        assert found.cure == f"have rank {peer} take part in this message, or rank 1 leave it out"


def test_a_call_that_the_others_never_make_is_named_and_one_of_a_loop_is_not() -> None:
    found = diagnose(run([SUM_3, SUM_3], [SUM_3], [SUM_3]))
    assert found
    assert found.cure == (
        "rank 0 makes a call (train.py:2) that ranks 1-2 do not: is it under a condition on the "
        "rank?"
    )
    states = run([SUM, SUM], [SUM])
    for at, state in enumerate(states):
        calls = tuple(replace(one, line="train.py:9 in step") for one in state.operations)
        waits = state.waits_for and replace(state.waits_for, line="train.py:9 in step")
        states[at] = replace(state, operations=calls, waits_for=waits)
    found = diagnose(states)
    assert found
    assert found.cure == Kind.ENDED.cure


def test_counts_tell_the_cause_only_where_they_leave_no_other() -> None:
    """A rank that has left the loop between forward and backward has gone on to no other pass."""
    metric, loop = [*STEP, *STEP, (SUM_2, 50)], [*STEP, *STEP, *STEP]

    def cure(*ranks: tuple[int, int, int]) -> str:
        found = diagnose(
            [
                replace(
                    state,
                    counts={
                        **state.counts,
                        Channel(FORWARDS, (0, 1), None, 0, 0): forwards,
                        Channel(UNUSED, (0, 1), None, 0, 0): unused,
                    },
                    batches={"train.py:40 in step": batches} if batches else {},
                )
                for state, (batches, forwards, unused) in zip(
                    (call(*metric, waits=True), call(*loop, waits=True, rank=1)), ranks, strict=True
                )
            ]
        )
        assert found
        return found.cure

    equal = "let all ranks decide alike which batches go without backward()"
    assert cure((3, 3, 1), (3, 3, 0)) == (
        f"rank 0 has made 3 forward passes and 2 backward passes (train.py:42): {equal}"
    )
    assert cure((2, 2, 0), (3, 3, 0)) == (
        "rank 0 has 2 batches, rank 1 has 3 (train.py:40): give all ranks equal numbers, or `with "
        "model.join():`"
    )
    for others in (((3, 2, 0), (3, 3, 0)), ((0, 3, 0), (0, 3, 0)), ((3, 3, 0), (2, 3, 0))):
        assert "is it under a condition on the rank?" in cure(*others)


@pytest.mark.parametrize(("dtype", "more"), [("int64", LISTS), ("float32", "")])
def test_of_lists_of_unequal_lengths_the_cure_names_the_function_that_takes_them(
    dtype: str, more: str
) -> None:
    lengths = collective("broadcast", peer=0, dtype=dtype)
    states = [call((replace(lengths, shape=(rank + 1,)), 3), rank=rank) for rank in range(2)]
    found = find_mismatch(states)
    assert found
    assert found.cure == f"{Kind.SHAPES.cure}{more}"


@pytest.mark.parametrize("change", [{"shape": (165,)}, {"dtype": "float64"}, {"peer": 1}])
def test_calls_of_one_name_that_meet_from_other_lines_are_no_matter_of_what_they_carry(
    change: dict[str, Any],
) -> None:
    """Where the others have never called from the line of one, and that one has from theirs."""
    own = replace(SUM, shape=(16,))
    other = replace(own, **change)
    states = [
        call((other, 38), (own, 64), waits=True), call((other, 38), (other, 38), waits=True, rank=1)
    ]  # fmt: skip
    for found in (diagnose(states), find_mismatch(states)):
        assert found
        assert found.cure.startswith(
            "rank 0 calls all_reduce (train.py:64), rank 1 does not: is it under a condition on "
            "the rank?"
        )
    for lines in ((64, 64), (64, 70)):  # one line; the branches of a condition
        states = [
            call((own if rank else other, line), waits=True, rank=rank)
            for rank, line in enumerate(lines)
        ]
        found = diagnose(states)
        assert found
        assert found.cure == found.kind.cure


def test_every_rank_s_shape_is_told_and_only_once() -> None:
    shapes = [replace(SUM_3, shape=(length,)) for length in (1, 2, 3)]
    found = diagnose(run(*([one] for one in shapes)))
    assert found
    assert found.difference == ""
    assert " ".join(found.sentence.split()) == (
        "deadlock: rank 0 is in all_reduce of shape [1] (train.py:1) where rank 1 is in all_reduce "
        "of shape [2] (:1) and rank 2 is in all_reduce of shape [3] (:1)"
    )


def test_a_call_that_meets_ddp_s_is_under_a_condition_or_has_come_too_early() -> None:
    """Where the others have called from its line before, the condition is not it."""
    states = [
        call(*STEP, (SUM_2, 50), waits=True), call(*STEP, (FORWARD_2, 41), waits=True, rank=1)
    ]  # fmt: skip
    for found in (diagnose(states), find_mismatch(states)):
        assert found
        assert found.cure == (
            "rank 0 calls all_reduce (train.py:50), rank 1 does not: is it under a condition on "
            "the rank? If not, have ranks unequal numbers of batches, or does one leave the loop "
            "early?"
        )
        assert not too_wide(str(found), 80)
    epoch = [*STEP, *STEP, (SUM_2, 50)]
    states = [
        call(*epoch, *STEP, (SUM_2, 50), waits=True), call(*epoch, *STEP, *STEP, waits=True, rank=1)
    ]  # fmt: skip
    for found in (diagnose(states), find_mismatch(states)):
        assert found
        assert (found.kind, found.cure) == (Kind.BESIDE_DDP, Kind.BESIDE_DDP.cure)


def test_ddp_s_second_forward_is_not_under_a_condition() -> None:
    """It arranges its buckets there: the others have come to its line, and called nothing."""
    states = [
        call((BACKWARD_2, 42), (SUM_2, 50), waits=True),
        call((BACKWARD_2, 42), (collective(BUCKETS), 41), waits=True, rank=1),
    ]
    found = diagnose(states)
    assert found
    assert found.cure.startswith("rank 0 calls all_reduce (train.py:50), rank 1 does not: ")


def test_a_group_that_may_have_been_left_out_is_asked_for() -> None:
    pair = collective("all_reduce", group=(0, 1), number=1)
    found = diagnose(run([pair, SUM_3], [pair, SUM_3], []))
    assert found
    assert found.cure.endswith("on the rank? Or is group= left out, for the group of ranks 0-1?")
    states = [
        call((pair, 40), (SUM_3, 50), waits=True),
        call((pair, 40), (BARRIER_3, 60), waits=True, rank=1),
        call((BARRIER_3, 60), waits=True, rank=2),
    ]
    found = diagnose(states)
    assert found
    assert "Or is group= left out, for the group of ranks 0-1? If not, call" in found.cure


def test_the_function_of_torch_is_named_that_a_line_has_called() -> None:
    mine, other = call((SUM_2, 50), waits=True), call((BARRIER_2, 60), waits=True, rank=1)
    there = replace(mine, called="full_tensor", stack=("train.py:50 in step",))
    found = diagnose([there, other])
    assert found
    assert "rank 0 is in full_tensor's all_reduce (train.py:50)" in " ".join(found.sentence.split())
    assert found.cure.startswith("rank 0 calls full_tensor (train.py:50), rank 1 does not: ")
    elsewhere = replace(there, stack=("train.py:70 in main",))
    same = replace(there, called="all_reduce")
    for state in (elsewhere, same):
        found = diagnose([state, other])
        assert found
        assert "'s all_reduce" not in found.sentence


def test_a_forward_that_others_do_not_make_is_one_of_the_wrapped_model() -> None:
    states = [call(*STEP, (FORWARD_2, 60), waits=True), call(*STEP, rank=1)]
    found = diagnose(states)
    assert found
    assert found.cure == (
        "rank 0 makes a call (train.py:60) that rank 1 does not: is it under a condition on the "
        "rank? If so, evaluate model.module, which calls no collective, or call the model on all "
        "ranks"
    )


METRIC, MEETING = "train.py:39 in evaluate", "train.py:74 in main"


@pytest.mark.parametrize(
    ("calls", "stacks", "cure"),
    [
        (
            [(SUM_3, METRIC), (BARRIER_3, MEETING), (BARRIER_3, MEETING)],
            [(METRIC, "train.py:71 in main"), (MEETING,), (MEETING,)],
            "rank 0 calls all_reduce (train.py:39, called in main :71), ranks 1-2 do not: is it "
            "under a condition on the rank? If not, call the same collectives in the same order on "
            "all ranks of the group",
        ),
        (
            [(BARRIER_3, MEETING), (SUM_3, METRIC), (SUM_3, METRIC)],
            [(MEETING,), *[(METRIC, "eval.py:5 in check", "train.py:75 in main")] * 2],
            "rank 0 calls barrier (train.py:74), ranks 1-2 do not: is it under a condition on the "
            "rank? If not, call the same collectives in the same order on all ranks of the group",
        ),
        (
            [(BARRIER_3, METRIC), (SUM_3, MEETING), (SUM_3, MEETING)],
            [(METRIC,), (MEETING,), (MEETING,)],
            Kind.COLLECTIVES.cure,
        ),
        (
            [(replace(BACKWARD_3, name=BUFFERS), METRIC), *[(BARRIER_3, MEETING)] * 2],
            [(METRIC, "model.py:3 in step", "train.py:70 in main"), (MEETING,), (MEETING,)],
            "rank 0 calls DDP's forward (train.py:39, called in main :70), ranks 1-2 do not: is it "
            "under a condition on the rank? If not, have ranks unequal numbers of batches, or does "
            "one leave the loop early?",
        ),
    ],
)
def test_of_two_calls_that_meet_the_one_that_comes_first_is_under_a_condition(
    calls: list[tuple[Operation, str]], stacks: list[tuple[str, ...]], cure: str
) -> None:
    """By the lines of the function in which the ranks' paths lead apart."""
    states = [
        replace(
            state,
            operations=(one := replace(state.operations[0], line=line),),
            waits_for=one,
            stack=stack,
        )
        for state, (_, line), stack in zip(
            run(*([call] for call, _ in calls)), calls, stacks, strict=True
        )
    ]
    found = diagnose(states)
    assert found
    assert found.cure == cure
    assert not too_wide(str(found), 80)


EPOCH, ALONE = [(BACKWARD_2, 23)] * 2, [(BACKWARD_2, 29)] * 3


def test_a_surplus_is_told_by_its_lines() -> None:
    """Each of its calls has met a later one of the same kind."""
    ahead = call(*EPOCH, *ALONE, *EPOCH[:1], waits=True)
    behind = call(*EPOCH, *EPOCH, EPOCH[0], rank=1)
    told = "rank 0 has called DDP's backward and 2 more (train.py:29), which rank 1 has not"
    for found in (diagnose([ahead, behind]), explain_failure([die(ahead, "failed"), behind])):
        assert found
        assert (found.difference, found.cure) == (told, Kind.SKIPPED.cure)
    early = call(*EPOCH, EPOCH[0], waits=True), call(*EPOCH, rank=1)
    plain = diagnose(early)
    assert plain
    assert plain.difference == "", "the lines are the same"


def test_a_model_that_most_ranks_call_is_not_called_alone() -> None:
    """A forward pass more is an evaluation by some ranks, or the others have left out a step."""
    forward, backward = (collective(name, 3) for name in (BUFFERS, BACKWARD))
    steps = [(forward, 41), (backward, 42)]
    more, step = call(*steps, (forward, 46), *steps), call(*steps, *steps)
    for callers, kind in ((1, Kind.ALONE), (2, Kind.SKIPPED)):
        states = [more] * callers + [step] * (3 - callers)
        found = find_mismatch([replace(each, rank=rank) for rank, each in enumerate(states)])
        assert found
        assert found.kind == kind


def test_a_deadlock_names_the_first_difference_if_ranks_have_passed_it() -> None:
    ahead = call(*STEP, (FORWARD_2, 46), (FORWARD_2, 41), waits=True)
    behind = call(*STEP, *STEP, waits=True, rank=1)
    found = diagnose([ahead, behind])
    assert found
    assert found.proved
    assert found.sentence == wrap_sentence(
        "deadlock: rank 0 is in DDP's forward (train.py:41) where rank 1 is in DDP's backward (:42)"
    )
    assert found.difference == "rank 0 has called DDP's forward (train.py:46), which rank 1 has not"
    assert f"before that: {found.difference}" in " ".join(str(found).split())
    assert found.cure == Kind.ALONE.cure


def test_a_deadlock_names_what_ranks_have_called_differently_before_it() -> None:
    receives = call((replace(SUM_2, dtype="int32"), 5), (receive(1), 6), waits=True)
    found = diagnose([receives, call((SUM_2, 7), (BARRIER, 8), waits=True, rank=1)])
    assert found
    assert (found.kind, found.proved) == (Kind.ABSENT, True)
    assert found.difference == (
        "rank 0 has called all_reduce of int32 (train.py:5) where rank 1 has called all_reduce of "
        "float32 (:7)"
    )
    assert found.cure == Kind.DTYPES.cure


def test_one_that_ranks_stand_at_is_not_told_twice() -> None:
    found = diagnose(run([SUM_2, SUM_2], [SUM_2, BARRIER]))
    assert found
    assert found.difference == ""


# --- why an operation failed ---


def die(state: RankState, end: str) -> RankState:
    return replace(state, doing=Doing.DEAD, end=end)


def test_the_operations_are_named_in_which_a_process_was_aborted() -> None:
    states = [call(*STEP, waits=True), call((FORWARD_2, 41), (SUM_2, 50), waits=True, rank=1)]
    found = explain_failure([states[0], die(states[1], "was killed by SIGABRT")])
    assert found
    assert not found.proved
    assert (found.kind, found.culprits) == (Kind.BESIDE_DDP, (0, 1))
    assert re.search(r"0 +DDP's backward #0 +train.py:42", found.table)
    assert re.search(r"1 +all_reduce #0 +train.py:50", found.table)


def test_what_a_rank_has_called_below_its_exception_is_not_what_failed() -> None:
    """It has failed in an all-reduce, and called a barrier in `finally`."""
    below = replace(BARRIER, raised="RuntimeError")
    failed, other = call((SUM_2, 5), (below, 9)), call((ROOT_0, 7), waits=True, rank=1)
    found = explain_failure([die(failed, "failed: Connection closed by peer"), other])
    assert found
    assert (found.kind, found.culprits) == (Kind.COLLECTIVES, (0, 1))
    assert re.search(r"0 +all_reduce #0 +train.py:5 ", found.table)


def test_what_a_rank_had_raised_is_said_first_and_its_traceback_last() -> None:
    """Whether it stands in `finally`, or was aborted there. Not where all have raised."""
    below = replace(SUM_2, raised="ValueError", state=AWAITED)
    error: dict[str, Any] = {
        "error": "ValueError: a damaged sample (data.py:9)",
        "traceback": "its\ntraceback",
    }
    failing = call((FORWARD_2, 41), (below, 50), waits=True, rank=1)
    states = [call(*STEP, waits=True), replace(failing, **error)]
    dead = [states[0], die(states[1], "was killed by SIGABRT")]
    for found in (diagnose(states), explain_failure(dead)):
        assert found
        first, *_, third, second, last = str(found).splitlines()
        assert first == "rank 1 had raised ValueError: a damaged sample (data.py:9)"
        assert (third, second, last) == ("what had been raised:", "its", "traceback")
        assert found.cure == Kind.IN_FINALLY.cure
    other = replace(BARRIER, raised="ValueError", state=AWAITED)
    states[0] = call((FORWARD_2, 41), (other, 50), waits=True)
    found = diagnose([replace(state, **error) for state in states])
    assert found
    assert not found.raised


def test_what_was_aborted_although_all_call_the_same_is_named() -> None:
    states = [call(*STEP, waits=True), call(*STEP, waits=True, rank=1)]
    found = explain_failure([states[0], die(states[1], "was killed by SIGABRT")])
    assert found
    assert (found.kind, found.culprits) == (Kind.ABORTED, (1,))
    assert found.sentence == wrap_sentence(
        "rank 1 was killed by SIGABRT in DDP's backward (train.py:42) while rank 0 is in DDP's "
        "backward (:42)"
    )
    assert explain_failure([states[0], die(states[1], "was killed by SIGKILL")]) is None


def test_a_closed_connection_is_explained_by_the_rank_that_has_ended() -> None:
    states = [call(*STEP, *STEP, waits=True), call(*STEP, rank=1)]
    found = explain_failure([die(states[0], "failed: Connection closed by peer"), states[1]])
    assert found
    assert (found.kind, found.culprits, found.proved) == (Kind.ENDED, (1,), False)
    assert " ".join(found.sentence.split()).startswith(
        "rank 1 has finished (last call: DDP's backward, train.py:42) while rank 0 is in DDP's"
    )


def test_a_send_that_nobody_waited_for_is_named() -> None:
    sent = call((send(1), 5))
    sent = replace(sent, operations=(replace(sent.operations[0], state=ISSUED),))
    lost = die(call((receive(0), 7), waits=True, rank=1), "failed: Connection closed by peer")
    found = explain_failure([sent, lost])
    assert found
    assert (found.kind, found.culprits) == (Kind.UNWAITED, (0,))
    assert found.sentence == wrap_sentence(
        "rank 0 has called send to rank 1 and not waited for it (train.py:5) where rank 1 is in "
        "recv from rank 0 (:7)"
    )


def test_a_receive_that_nobody_waited_for_is_named_and_not_who_waits_for_its_rank() -> None:
    """Rank 1 has dropped its first receive, and waits for the second, which has been sent. Rank 0
    waits for rank 1 to receive a third."""
    sender = call((send(1), 5), (send(1), 6), (send(1), 7), waits=True)
    receiver = call((receive(0), 11), (receive(0), 12), waits=True, rank=1)
    first, *rest = receiver.operations
    for state, kind in ((DONE, Kind.RUNNING), (ISSUED, Kind.UNWAITED_RECEIVE)):
        dropped = replace(receiver, operations=(replace(first, state=state), *rest))
        found = diagnose([sender, dropped])
        assert found
        assert (found.kind, found.proved) == (kind, False)
        assert found.sentence.startswith("rank 1 ")
    assert found
    assert found.culprits == (1,)
    assert found.sentence == wrap_sentence(
        "rank 1 has not waited for its recv from rank 0 (train.py:11) while rank 1 is in a later "
        "one (:12)"
    )


def test_a_sentence_fits_behind_its_prefix() -> None:
    for length in range(1, 60):
        sentence = wrap_sentence(f"{'x' * length} {'word ' * 30}")
        assert max(map(len, f"{PREFIX}{sentence}".splitlines())) <= 80


def test_a_send_that_is_over_is_not_taken_for_one_that_nobody_waits_for() -> None:
    """What it has sent is on its way."""
    sent, receiver = call((send(1), 5)), call((receive(0), 7), waits=True, rank=1)
    for state, kind in ((DONE, Kind.RUNNING), (ISSUED, Kind.UNWAITED)):
        operations = tuple(replace(one, state=state) for one in sent.operations)
        found = diagnose([replace(sent, operations=operations), receiver])
        assert found
        assert (found.kind, found.proved) == (kind, False)


def test_an_error_of_the_program_is_explained_by_nothing() -> None:
    states = [call(*STEP, waits=True), die(call(*STEP, rank=1), "failed: ValueError")]
    assert explain_failure(states) is None
