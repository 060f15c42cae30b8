"""Our collectives: equal to the backend's for every tensor and in any group, at once or in the
background."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_tensors import agree, any_tensor, bits_of, data_for, few
from fixtures import Worlds
from hypothesis import given, strategies as st
from ranks import all_reduce_in_group, all_reduce_large, observed, several_at_once

from playground.algorithms import ALGORITHMS, executor, load_algorithm, load_all_reduce
from playground.algorithms.collectives import check_shares
from playground.algorithms.cost_model import RING_PIECE
from playground.algorithms.operation import check
from playground.testing import World
from playground.world import device
from playground.world.backends import BACKENDS

NAMES = sorted(ALGORITHMS)
Case = tuple[str, list[int], str, tuple[str, str], int]
cases = st.lists(st.tuples(st.sampled_from(NAMES), *any_tensor), min_size=60, max_size=60)


def reduce_by_backend(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """What an all-reduce of it must leave."""
    theirs = tensor.clone(memory_format=torch.contiguous_format)
    if op == "AVG":  # gloo has none that can be trusted
        dist.all_reduce(theirs)
        return theirs / dist.get_world_size()
    dist.all_reduce(theirs, getattr(dist.ReduceOp, op))
    return theirs


def compare_all_reduce(rank: int, size: int, cases: list[Case]) -> list[tuple[bool, bytes]]:
    """Each case by our algorithm and by the backend: whether they agree, and the bits of ours."""
    outcomes = []
    for name, shape, layout, (dtype, op), seed in cases:
        ours = data_for(rank, shape, layout, dtype, seed)
        strides, theirs = ours.stride(), reduce_by_backend(ours, op)
        load_all_reduce(name)(ours, getattr(dist.ReduceOp, op))
        assert ours.stride() == strides
        outcomes.append((agree(ours, theirs, dtype), bits_of(ours)))
    return outcomes


@pytest.mark.parametrize(
    "size", [2, 4, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 3, 5, 6, 7, 8))]
)
def test_every_algorithm_is_all_reduce(size: int, world: Worlds) -> None:
    """Exact for integers, within rounding for floating point, and the same bits on every rank (but
    for one)."""

    @few
    @given(cases)
    def compare(drawn: list[Case]) -> None:
        by_rank = world(size).run(compare_all_reduce, drawn)
        for case, outcomes in zip(drawn, zip(*by_rank, strict=True), strict=True):
            assert all(right for right, _ in outcomes), (size, case)
            if ALGORITHMS[case[0]].same_bits:
                assert len({bits for _, bits in outcomes}) == 1, (size, case)

    compare()


def compare_phases(rank: int, size: int, cases: list[Case]) -> list[tuple[bool, bool]]:
    """Whether reduce-scatter and all-gather leave what the backend's leave, and nothing else
    changes."""
    outcomes = []
    for _, shape, layout, (dtype, op), seed in cases:
        given = data_for(rank, [size, *shape], layout, dtype, seed)
        plain = given.clone(memory_format=torch.contiguous_format).view(-1)
        share = torch.empty(len(plain) // size, dtype=given.dtype)
        load_algorithm("reduce_scatter", "ring")(share, given, getattr(dist.ReduceOp, op))
        theirs = reduce_by_backend(plain, op)[rank * len(share) : (rank + 1) * len(share)]
        scattered = agree(share, theirs, dtype) and torch.equal(given.reshape(-1), plain)
        mine = data_for(rank, shape, layout, dtype, seed)
        whole = data_for(rank, [size, *mine.shape], layout, dtype, seed)  # of any layout too
        if whole.numel() != size * mine.numel():
            whole = torch.empty([size, *mine.shape], dtype=mine.dtype)
        strides, theirs = whole.stride(), whole.new_empty(whole.numel())
        dist.all_gather_into_tensor(
            theirs, mine.clone(memory_format=torch.contiguous_format).view(-1)
        )
        load_algorithm("all_gather", "ring")(whole, mine)
        outcomes.append(
            (scattered, bits_of(whole) == bits_of(theirs) and whole.stride() == strides)
        )
    return outcomes


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 2, 4, 5))]
)
def test_each_phase_of_the_ring_is_a_collective(size: int, world: Worlds) -> None:
    """Reduce-scatter is `dist.reduce_scatter_tensor`, all-gather is
    `dist.all_gather_into_tensor`."""

    @few
    @given(cases)
    def compare(drawn: list[Case]) -> None:
        for outcomes in world(size).run(compare_phases, drawn):
            wrong = [
                case for case, right in zip(drawn, outcomes, strict=True) if right != (True, True)
            ]
            assert not wrong, (size, wrong)

    compare()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.stress), 3])
def test_large_tensors_in_many_pieces(size: int, world: Worlds) -> None:
    """Large enough for the ring to cut its chunks, and not divisible by anything."""
    numel = 3 * size * RING_PIECE // 4 + 7
    assert world(size).run(all_reduce_large, numel, NAMES) == [dict.fromkeys(NAMES, True)] * size


@pytest.mark.parametrize("members", [[0], [3, 1, 0]])
def test_any_subgroup(members: list[int], world: Worlds) -> None:
    """A rank outside does nothing, and its tensor stays as it was."""
    total = float(sum(rank + 1 for rank in members))
    for rank, after in enumerate(world(4).run(all_reduce_in_group, members, NAMES)):
        assert after == dict.fromkeys(NAMES, total if rank in members else rank + 1.0)


def phases_in_group(
    rank: int, size: int, members: list[int], async_op: bool
) -> dict[str, list[float]]:
    """What the phases leave in a group of these ranks; -1 where nothing was written."""
    group = dist.new_group(members)
    share, whole = torch.full((2,), -1.0), torch.full((2 * len(members),), -1.0)
    given = torch.arange(2.0 * len(members)) + rank
    works: list[Any] = [
        load_algorithm("reduce_scatter", "ring")(share, given, group=group, async_op=async_op),
        load_algorithm("all_gather", "ring")(whole, given[:2], group=group, async_op=async_op),
    ]
    assert (
        all(work.wait() and work.is_completed() for work in works)
        if async_op
        else works == [None] * 2
    )
    return {"share": share.tolist(), "whole": whole.tolist()}


@pytest.mark.parametrize(
    ("members", "async_op"), [([0], False), ([3, 1, 0], False), ([1, 3], True)]
)
def test_phases_in_any_subgroup(members: list[int], async_op: bool, world: Worlds) -> None:
    """Shares go by a rank's number in the group. A rank outside does nothing, and its tensors stay
    as they were."""
    outcomes = world(4).run(phases_in_group, members, async_op)
    members = sorted(members)  # as dist.new_group has them
    total = [len(members) * position + sum(members) for position in range(2 * len(members))]
    gathered = [number for member in members for number in (member, member + 1)]
    for rank, outcome in enumerate(outcomes):
        if rank not in members:
            assert outcome == {"share": [-1.0] * 2, "whole": [-1.0] * len(total)}
            continue
        first = 2 * members.index(rank)
        assert outcome == {"share": total[first : first + 2], "whole": gathered}


def our_all_reduce_as_on_nccl(rank: int, size: int, numel: int) -> dict[str, list[bool]]:
    """Messages in batches, and no second thread: for each algorithm, whether it was right,
    synchronous and not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "IN_BATCHES", {"cpu"})
        patch.setattr(BACKENDS["gloo"], "allows_threads", False)
        return {
            name: all_reduce_twice(load_all_reduce(name), rank, size, numel) for name in ALGORITHMS
        }


def all_reduce_twice(all_reduce: Any, rank: int, size: int, numel: int) -> list[bool]:
    mine = torch.arange(numel, dtype=torch.int64) * (rank + 1)
    expected = torch.arange(numel) * sum(range(size + 1))
    ours, beside = mine.clone(), mine.clone()
    all_reduce(ours)
    work = all_reduce(beside, async_op=True)
    done = work.is_completed()  # nothing is left to a thread
    work.wait()
    return [torch.equal(ours, expected), torch.equal(beside, expected), done]


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
)
def test_our_all_reduce_where_messages_go_in_batches_and_no_second_thread_may(
    size: int, world: Worlds
) -> None:
    for right in world(size).run(our_all_reduce_as_on_nccl, 300_007):
        assert right == {name: [True] * 3 for name in ALGORITHMS}


@pytest.mark.parametrize("name", ["ring", "auto"])
def test_asynchronous_all_reduces_take_turns(name: str, world: Worlds) -> None:
    for result in world(3, timeout=20).run(several_at_once, name):
        assert result == [*(6.0 + 3 * length for length in (1, 5, 100_000, 3)), 6.0]


def failure_at_wait(rank: int, size: int) -> str:
    def fail(*_: Any) -> None:
        raise ValueError("no more")

    with observed(fail):
        work: Any = load_all_reduce("ring")(torch.ones(10), async_op=True)
        try:
            work.wait()
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def test_an_asynchronous_all_reduce_fails_where_it_is_waited_for(world: Worlds) -> None:
    assert world(2).run(failure_at_wait) == ["no more"] * 2


@pytest.mark.parametrize(
    ("dtype", "op", "message"),
    [
        ("float32", "BAND", "BAND is defined for integers, not for float32"),
        ("int64", "AVG", "AVG is defined for floating point, not for int64"),
        ("complex64", "MAX", "MAX is not defined for complex64"),
        ("float32", "PREMUL_SUM", "is not among the operations"),
    ],
)
def test_what_is_not_defined_is_refused(dtype: str, op: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(getattr(torch, dtype), getattr(dist.ReduceOp, op))


def test_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 elements are not 2 shares of 2"):
        check_shares(torch.zeros(3), torch.zeros(2), 2)
    with pytest.raises(
        ValueError, match="float32 and int64: input and output must have the same type"
    ):
        check_shares(torch.zeros(()), torch.zeros((), dtype=torch.int64), 1)


def test_the_table_and_the_costs_do_without_torch(
    torch_is_imported: Callable[..., list[str]],
) -> None:
    assert not torch_is_imported("playground.algorithms", "playground.algorithms.cost_model")


@pytest.mark.gpu
def test_our_all_reduce_on_gpus(pair: int, nccl: World) -> None:
    names = sorted(ALGORITHMS)
    for numel in (0, 5, 1_000_003):
        assert nccl.run(all_reduce_large, numel, names) == [dict.fromkeys(names, True)] * pair


@pytest.mark.gpu
def test_our_all_reduce_in_a_subgroup_on_gpus(pair: int, nccl: World) -> None:
    names = sorted(ALGORITHMS)
    members = list(range(pair - pair % 2))
    expected = float(sum(rank + 1 for rank in members))
    for rank, after in enumerate(nccl.run(all_reduce_in_group, members, names)):
        assert after == dict.fromkeys(names, expected if rank in members else rank + 1.0)


@pytest.mark.gpu
def test_asynchronous_all_reduces_take_turns_on_gpus(pair: int, nccl: World) -> None:
    total = sum(range(pair + 1))
    for result in nccl.run(several_at_once, "ring"):
        assert result == [
            *(float(total + pair * length) for length in (1, 5, 100_000, 3)),
            float(total),
        ]


def ours_and_then_torch_s(rank: int, size: int) -> set[float]:
    """Asynchronous sums of ours, and one of torch's behind them, which some ranks come to later
    than others."""
    all_reduce, tensors = load_all_reduce("ring"), list(torch.ones(20, 1000, device=device()))
    works: list[Any] = [all_reduce(tensor, async_op=True) for tensor in tensors[1:]]
    time.sleep(0.3 * rank)
    dist.all_reduce(tensors[0])
    assert all(work.wait() for work in works)
    return {value for tensor in tensors for value in tensor.tolist()}


@pytest.mark.gpu
def test_asynchronous_all_reduces_are_issued_at_once(pair: int, nccl: World) -> None:
    """What a communicator is given, it does in that order, which must be the same on all ranks."""
    assert nccl.run(ours_and_then_torch_s) == [{float(pair)}] * pair
