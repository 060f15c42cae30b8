"""The wait graph by itself: what an operation lacks, who is never released, and whose fault it
is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from playground.explain.hang import (
    COLLECTIVE,
    NEW_GROUP,
    RECEIVE,
    STRANGERS,
    Doing,
    Kind,
    Operation,
    RankState,
)
from playground.explain.hang.states import AWAITED, SEND
from playground.explain.hang.wait_graph import (
    WaitGraph,
    find_difference,
    find_minority,
    leave_out_renumbered,
)

WORLD = (0, 1, 2)


def collective(name: str, index: int = 0, peer: int | None = None) -> Operation:
    return Operation(
        kind=COLLECTIVE, name=name, index=index, group=WORLD, shape=(4,), dtype="float32", peer=peer
    )


def message(kind: str, peer: int | None) -> Operation:
    name = {SEND: "send", RECEIVE: "recv"}[kind]
    return Operation(
        kind=kind, name=name, index=0, group=WORLD, shape=(4,), dtype="float32", peer=peer
    )


def in_operation(rank: int, *calls: Operation) -> RankState:
    """A rank that has called these, and waits in the last."""
    *before, last = calls
    return RankState(
        rank=rank,
        doing=Doing.IN_OPERATION,
        operations=tuple(before),
        waits_for=replace(last, state=AWAITED),
        counts=Counter(call.channel for call in calls),
    )


def test_a_peer_below_0_is_a_stranger_too() -> None:
    assert message(SEND, STRANGERS - 1).stranger == -1
    assert message(SEND, STRANGERS + 7).stranger == 7
    assert message(SEND, 2).stranger is None


def finished(rank: int, *calls: Operation) -> RankState:
    counts = Counter(call.channel for call in calls)
    return RankState(rank=rank, doing=Doing.FINISHED, operations=calls, counts=counts)


SUM, BARRIER = collective("all_reduce"), collective("barrier")


def blocked_and_culprits(*states: RankState) -> tuple[set[int], set[int]]:
    graph = WaitGraph(states)
    blocked = graph.find_blocked(graph.waits, set())
    return blocked, graph.find_culprits(graph.waits, blocked) if blocked else set()


def test_a_rank_that_computes_may_still_come() -> None:
    computes = RankState(rank=2, doing=Doing.IN_PROGRAM)
    graph = WaitGraph([in_operation(0, SUM), in_operation(1, SUM), computes])
    assert {rank: wait.missing for rank, wait in graph.waits.items()} == {0: {2}, 1: {2}}
    assert graph.find_blocked(graph.waits, set()) == set()


def test_a_rank_that_has_finished_never_comes_and_is_at_fault() -> None:
    states = in_operation(0, SUM), in_operation(1, SUM), finished(2)
    assert blocked_and_culprits(*states) == ({0, 1}, {2})


def test_whoever_may_still_act_has_not_finished() -> None:
    acts = replace(finished(2), may_act="what thread Thread-1 does")
    is_in_doubt = replace(finished(2), unnamed="what it has called by send")
    for last in (acts, is_in_doubt):
        states = in_operation(0, SUM), in_operation(1, SUM), last
        assert blocked_and_culprits(*states) == (set(), set())


def test_the_minority_is_at_fault() -> None:
    states = in_operation(0, SUM), in_operation(1, BARRIER), in_operation(2, SUM)
    graph = WaitGraph(states)
    assert graph.waits[0].differing == {1}
    assert graph.waits[1].differing == {0, 2}
    assert blocked_and_culprits(*states) == ({0, 1, 2}, {1})


def test_without_a_majority_all_may_be_at_fault() -> None:
    assert find_minority({0: SUM, 1: BARRIER, 2: SUM}) == {1}
    assert find_minority({0: SUM, 1: BARRIER}) == {0, 1}
    assert find_minority({0: SUM, 1: BARRIER, 2: None}) == {0, 1}


def test_messages_wait_for_their_other_part() -> None:
    states = [in_operation(rank, message(RECEIVE, (rank + 1) % 3)) for rank in WORLD]
    assert blocked_and_culprits(*states)[0] == {0, 1, 2}
    states[0] = in_operation(0, message(SEND, 2))  # for which rank 2 waits
    assert blocked_and_culprits(*states) == (set(), set())


@pytest.mark.parametrize(("second", "blocked"), [(Doing.IN_PROGRAM, set()), (Doing.FINISHED, {0})])
def test_one_of_many_is_enough_for_a_receive_from_anyone(second: Doing, blocked: set[int]) -> None:
    states = (
        in_operation(0, message(RECEIVE, None)),
        finished(1),
        RankState(rank=2, doing=second),
    )
    assert blocked_and_culprits(*states)[0] == blocked


def test_a_broadcast_needs_its_root_alone() -> None:
    cast = collective("broadcast", peer=0)
    assert WaitGraph([in_operation(1, cast), finished(0, cast), finished(2)]).waits[1].missing == (
        set()
    )
    assert WaitGraph([in_operation(1, cast), finished(0), finished(2, cast)]).waits[1].missing == {
        0
    }


def test_members_alone_wait_in_a_group_that_is_made() -> None:
    make = replace(collective(NEW_GROUP), members=(0, 1))
    graph = WaitGraph([finished(0), in_operation(1, make), in_operation(2, make)])
    assert {rank: wait.missing for rank, wait in graph.waits.items()} == {1: {0}, 2: set()}


def test_calls_meet_by_their_place() -> None:
    second = replace(SUM, index=1)
    graph = WaitGraph([in_operation(0, SUM, second), in_operation(1, SUM), finished(2, SUM)])
    assert {rank: wait.missing for rank, wait in graph.waits.items()} == {0: {1, 2}, 1: set()}


@pytest.mark.parametrize(
    ("change", "kind", "strict_kind"),
    [
        ({"name": "barrier"}, Kind.COLLECTIVES, Kind.COLLECTIVES),
        ({"shape": (5,)}, Kind.SHAPES, Kind.SHAPES),
        ({"shape": (2, 2)}, None, None),
        ({"dtype": "int32"}, None, Kind.DTYPES),
        ({"dtype": "float64"}, Kind.DTYPES, Kind.DTYPES),
        ({"peer": 1}, Kind.ROOTS, Kind.ROOTS),
    ],
)
def test_what_keeps_calls_apart(
    change: dict[str, object], kind: Kind | None, strict_kind: Kind | None
) -> None:
    other = replace(SUM, **change)  # type: ignore[arg-type]
    assert find_difference(SUM, other) == kind
    assert find_difference(SUM, other, strictly=True) == strict_kind


def test_the_order_of_elements_keeps_no_call_from_ending() -> None:
    one, other = replace(SUM, shape=(2, 3)), replace(SUM, shape=(3, 2))
    assert find_difference(one, other) is None
    assert find_difference(one, other, strictly=True) == Kind.SHAPES
    assert find_difference(one, replace(SUM, shape=(2, 1, 3)), strictly=True) is None


def test_who_has_another_number_is_left_blank() -> None:
    states = [in_operation(0, SUM), replace(in_operation(1, SUM), is_renumbered=True)]
    assert leave_out_renumbered(states[:1]) == states[:1]
    for state in leave_out_renumbered(states):
        assert (state.doing, state.waits_for, state.counts) == (Doing.IN_PROGRAM, None, {})
        assert state.may_act
