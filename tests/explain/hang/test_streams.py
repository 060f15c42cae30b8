"""Ranks with GPUs are shown in the operations that their streams have come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from playground.explain.hang import COLLECTIVE, RECEIVE, Doing, Kind, Operation, RankState
from playground.explain.hang.diagnosis import diagnose
from playground.explain.hang.states import DESTROY, HOST, SEND, Gpu
from playground.explain.hang.streams import stand_in_streams, suppose_wait

SIZE = 2


class Rank:
    """Writes down what one rank calls, as its flight recorder does."""

    def __init__(self, rank: int, gpu: Gpu = Gpu.SIMULATED) -> None:
        self.rank, self.gpu = rank, gpu
        self.operations: list[Operation] = []
        self.counts: Counter[Any] = Counter()
        self.doing = Doing.IN_PROGRAM
        self.waits_for: Operation | None = None

    def call(self, name: str = "all_reduce", **more: Any) -> int:
        """An operation in the one stream, behind the one before unless `behind` is given."""
        call = len(self.operations)
        kind = more.pop("kind", COLLECTIVE)
        queued = {"batch": call, "behind": (call - 1,) if call else ()}
        one = Operation(
            kind=kind, name=name, index=0, group=tuple(range(SIZE)), call=call,
            line=f"train.py:{call} in <module>", **queued | more,
        )  # fmt: skip
        object.__setattr__(one, "index", self.counts[one.channel])
        self.counts[one.channel] += 1
        self.operations.append(one)
        return call

    def wait(self, *batches: int, name: str = "synchronize") -> None:
        """The host waits for these."""
        call = self.call(name, kind=HOST, batch=None, behind=batches)
        self.doing, self.waits_for = Doing.IN_OPERATION, self.operations[call]

    @property
    def state(self) -> RankState:
        return RankState(
            rank=self.rank, gpu=self.gpu, doing=self.doing, waits_for=self.waits_for,
            operations=tuple(self.operations), counts=self.counts,
        )  # fmt: skip


def make(gpu: Gpu = Gpu.SIMULATED) -> tuple[Rank, Rank]:
    return Rank(0, gpu), Rank(1, gpu)


def show(*ranks: Rank) -> list[RankState]:
    return stand_in_streams([rank.state for rank in ranks])


def lines(operations: Sequence[Operation]) -> list[str]:
    return [one.line.split()[0] for one in operations]


def test_states_without_a_gpu_stay_as_they_are() -> None:
    ranks = make(Gpu.NONE)
    for rank in ranks:
        rank.call(batch=None, behind=())
    assert show(*ranks) == [rank.state for rank in ranks]


def test_a_rank_stands_in_what_its_stream_has_come_to() -> None:
    first, second = make()
    for _ in range(4):
        first.call()
    first.wait(3)
    for _ in range(2):
        second.call()
    second.wait(1)
    shown = show(first, second)
    assert (shown[0].doing, shown[0].waits_for) == (Doing.IN_OPERATION, first.operations[2])
    assert lines(shown[0].operations) == ["train.py:0", "train.py:1", "train.py:2"]
    assert [*shown[0].counts.values()] == [3]
    # the other goes on: it has called all that it waits for
    assert (shown[1].doing, shown[1].waits_for) == (Doing.IN_PROGRAM, None)
    assert diagnose([first.state, second.state]).kind == Kind.STRAGGLER  # type: ignore[union-attr]


@pytest.mark.parametrize("gpu", [Gpu.SIMULATED, Gpu.REAL])
def test_what_has_not_begun_meets_nobody(gpu: Gpu) -> None:
    """Two groups in opposite order: each rank has called both."""
    ranks = make(gpu)
    for rank in ranks:
        for number in (1, 2) if rank.rank else (2, 1):
            rank.call(number=number)
        rank.wait(1)
    found = diagnose([rank.state for rank in ranks])
    assert found
    assert (found.proved, found.kind, found.culprits) == (True, Kind.GROUPS, (0, 1))


def test_streams_of_their_own_hold_nobody() -> None:
    ranks = make()
    for rank in ranks:
        for number in (1, 2) if rank.rank else (2, 1):
            rank.call(number=number, behind=())
        rank.wait(0, 1)
    assert {state.doing for state in show(*ranks)} == {Doing.IN_PROGRAM}


@pytest.mark.parametrize(("gpu", "proved"), [(Gpu.SIMULATED, True), (Gpu.REAL, False)])
def test_only_the_simulated_nccl_surely_waits_for_what_does_not_match(
    gpu: Gpu, proved: bool
) -> None:
    for shapes, tags in (((2,), (3,)), (0, 0)), (((2,), (2,)), (0, 3)):
        ranks = make(gpu)
        for rank, shape, tag in zip(ranks, shapes, tags, strict=True):
            rank.call(shape=shape, tag=tag, dtype="float32")
            rank.wait(0)
        found = diagnose([rank.state for rank in ranks])
        assert (found is not None and found.proved) == proved


@pytest.mark.parametrize(("gpu", "proved"), [(Gpu.SIMULATED, True), (Gpu.REAL, False)])
def test_only_the_simulated_nccl_surely_holds_a_send(gpu: Gpu, proved: bool) -> None:
    ranks = make(gpu)
    for rank in ranks:
        rank.call("send", kind=SEND, peer=1 - rank.rank)
        rank.call("recv", kind=RECEIVE, peer=1 - rank.rank)
        rank.wait(1)
    found = diagnose([rank.state for rank in ranks])
    assert (found is not None and found.kind == Kind.SENDS and found.proved) == proved


@pytest.mark.parametrize(("gpu", "proved"), [(Gpu.SIMULATED, True), (Gpu.REAL, False)])
def test_a_message_of_another_size_holds_both_in_the_simulated_nccl(gpu: Gpu, proved: bool) -> None:
    first, second = make(gpu)
    first.call("send", kind=SEND, peer=1, shape=(4,), dtype="float32")
    second.call("recv", kind=RECEIVE, peer=0, shape=(5,), dtype="float32")
    for rank in (first, second):
        rank.wait(0)
    found = diagnose([first.state, second.state])
    assert (found is not None and found.kind == Kind.SIZES and found.proved) == proved


def test_receives_hold_each_other_everywhere() -> None:
    ranks = make(Gpu.REAL)
    for rank in ranks:
        rank.call("recv", kind=RECEIVE, peer=1 - rank.rank)
        rank.call("send", kind=SEND, peer=1 - rank.rank)
        rank.wait(1)
    found = diagnose([rank.state for rank in ranks])
    assert found
    assert (found.proved, found.kind) == (True, Kind.RECEIVES)


def test_messages_of_a_batch_do_not_wait_for_each_other() -> None:
    ranks = make()
    for rank in ranks:
        rank.call("send", kind=SEND, peer=1 - rank.rank, batch=0, behind=())
        rank.call("recv", kind=RECEIVE, peer=1 - rank.rank, batch=0, behind=())
        rank.wait(0)
    assert {state.doing for state in show(*ranks)} == {Doing.IN_PROGRAM}


def test_a_batch_ends_as_one() -> None:
    first, second = make()
    first.call("send", kind=SEND, peer=1, batch=0, behind=())
    first.call("recv", kind=RECEIVE, peer=1, batch=0, behind=())
    first.wait(0)
    second.call("recv", kind=RECEIVE, peer=0, batch=0, behind=())
    second.wait(0, name=DESTROY)
    shown = show(first, second)
    assert shown[0].waits_for == first.operations[1]
    assert shown[1].waits_for is None
    assert shown[1].doing == Doing.FINISHED


def test_a_batch_without_an_end_has_not_begun() -> None:
    first, second = make()
    first.call(is_open=True)
    first.doing = Doing.FINISHED
    second.call()
    second.wait(0)
    shown = show(first, second)
    assert (shown[0].operations, shown[0].unlaunched) == ((), tuple(first.operations))
    found = diagnose([first.state, second.state])
    assert found
    assert (found.proved, found.kind, found.cure) == (True, Kind.OPEN, Kind.OPEN.cure)
    assert found.difference.startswith("rank 0 has called all_reduce in a batch that has no end")


def test_a_rank_in_the_program_may_call_what_others_wait_for() -> None:
    first, second = make()
    first.call()
    first.wait(0)
    assert diagnose([first.state, second.state]).proved is False  # type: ignore[union-attr]
    second.doing = Doing.FINISHED
    assert diagnose([first.state, second.state]).proved is True  # type: ignore[union-attr]


def test_a_host_that_waits_for_other_things_is_not_held() -> None:
    first, second = make()
    first.call("recv", kind=RECEIVE, peer=1)
    first.wait()
    second.call("recv", kind=RECEIVE, peer=0)
    second.wait(0)
    found = diagnose([first.state, second.state])
    assert found is None or not found.proved


def test_a_communicator_is_made_by_the_calls_of_hosts() -> None:
    """A host that is in a call itself waits for the hosts of the others, not for their streams."""
    first, second = make()
    for rank, other in ((first, 2), (second, 1)):
        rank.call(number=3 - other)
        rank.doing, rank.waits_for = Doing.IN_OPERATION, rank.operations[0]
    found = diagnose([first.state, second.state])
    assert found
    assert (found.proved, found.kind) == (True, Kind.GROUPS)
    second.call(number=1)
    found = diagnose([first.state, second.state])
    assert found is None or not found.proved


def test_older_operations_count_as_over() -> None:
    first, second = make()
    for rank in (first, second):
        for _ in range(3):
            rank.call()
        del rank.operations[:2]
    first.wait(0)
    assert show(first, second)[0].doing == Doing.IN_PROGRAM


def test_a_wait_is_supposed_of_a_simulated_gpu_only() -> None:
    first, second = make()
    first.call()
    assert suppose_wait(first.state).waits_for.behind == (0,)  # type: ignore[union-attr]
    assert suppose_wait(first.state, ()).waits_for.behind == ()  # type: ignore[union-attr]
    first.gpu = Gpu.REAL
    second.doing = Doing.FINISHED
    for rank in (first, second):
        assert suppose_wait(rank.state) == rank.state
