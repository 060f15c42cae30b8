"""The two phases of the ring, reduce-scatter and all-gather, as collectives of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_tensors import agree, any_tensor, bits_of, data_for, few
from hypothesis import given, strategies as st

from playground.algorithms import OURS, load_algorithm
from playground.runtime import RankFailed
from playground.testing import World

Worlds = Callable[..., World]
cases_of_shares = st.lists(st.tuples(*any_tensor), min_size=100, max_size=100)


def compare_reduce_scatter(rank: int, size: int, cases: list[Any]) -> list[bool]:
    """Each case by our reduce-scatters and by the backend: whether they agree and ours leave the input alone."""
    outcomes = []
    for shape, layout, (dtype, op), seed in cases:
        for name in OURS["reduce_scatter"]:
            given = data_for(rank, [size, *shape], layout, dtype, seed)
            theirs = torch.empty(given.numel() // size, dtype=given.dtype)
            plain = given.clone(memory_format=torch.contiguous_format).view(-1)
            if op == "AVG":
                dist.reduce_scatter_tensor(theirs, plain.clone())
                theirs /= size
            else:
                dist.reduce_scatter_tensor(theirs, plain.clone(), getattr(dist.ReduceOp, op))
            ours = torch.empty_like(theirs)
            load_algorithm("reduce_scatter", name)(ours, given, getattr(dist.ReduceOp, op))
            outcomes.append(agree(ours, theirs, dtype) and torch.equal(given.reshape(-1), plain))
    return outcomes


def compare_all_gather(rank: int, size: int, cases: list[Any]) -> list[bool]:
    """Each case by every one of our all-gathers and by the backend: whether they agree."""
    outcomes = []
    for shape, layout, (dtype, _), seed in cases:
        for name in OURS["all_gather"]:
            given = data_for(rank, shape, layout, dtype, seed)
            theirs = torch.empty(size * given.numel(), dtype=given.dtype)
            dist.all_gather_into_tensor(theirs, given.clone(memory_format=torch.contiguous_format).view(-1))
            ours = data_for(rank, [size, *given.shape], layout, dtype, seed)  # of any layout too
            if ours.numel() != theirs.numel():
                ours = torch.empty([size, *given.shape], dtype=given.dtype)
            strides = ours.stride()
            load_algorithm("all_gather", name)(ours, given)
            outcomes.append(bits_of(ours) == bits_of(theirs) and ours.stride() == strides)
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (4, 5))])
@pytest.mark.parametrize("compare", [compare_reduce_scatter, compare_all_gather])
def test_each_phase_of_the_ring_is_a_collective(compare: Callable[..., Any], size: int, world: Worlds) -> None:
    """Reduce-scatter is `dist.reduce_scatter_tensor`, all-gather is `dist.all_gather_into_tensor`."""

    @few
    @given(cases_of_shares)
    def check_all(drawn: list[Any]) -> None:
        for outcomes in world(size).run(compare, drawn):
            wrong = [case for case, right in zip(drawn, outcomes, strict=True) if not right]
            assert not wrong, (size, wrong)

    check_all()


def scatter_and_gather_in_group(rank: int, size: int, members: list[int]) -> dict[str, list[float]]:
    """What the phases leave in a group of these ranks; -1 where nothing was written."""
    group = dist.new_group(members)
    share, whole = torch.full((2,), -1.0), torch.full((2 * len(members),), -1.0)
    given = torch.arange(2.0 * len(members)) + rank
    load_algorithm("reduce_scatter", "ring")(share, given, group=group)
    load_algorithm("all_gather", "ring")(whole, given[:2], group=group)
    return {"share": share.tolist(), "whole": whole.tolist()}


@pytest.mark.parametrize("members", [[0], [1, 3], [3, 1, 0], [0, 1, 2, 3]])
def test_phases_in_any_subgroup(members: list[int], world: Worlds) -> None:
    """Shares go by a rank's number in the group. A rank outside does nothing, and its tensors stay as they were."""
    outcomes = world(4).run(scatter_and_gather_in_group, members)
    members = sorted(members)  # as dist.new_group has them
    total = [len(members) * position + sum(members) for position in range(2 * len(members))]
    gathered = [number for member in members for number in (member, member + 1)]
    for rank, outcome in enumerate(outcomes):
        if rank not in members:
            assert outcome == {"share": [-1.0] * 2, "whole": [-1.0] * len(total)}
            continue
        first = 2 * members.index(rank)
        assert outcome == {"share": total[first : first + 2], "whole": gathered}


def scatter_and_gather_in_background(rank: int, size: int) -> tuple[list[list[float]], list[float]]:
    """Both phases with `async_op`, several at once."""
    shares = [torch.zeros(1) for _ in range(3)]
    works: list[Any] = [
        load_algorithm("reduce_scatter", "ring")(share, torch.arange(size) + 10.0 * number, async_op=True)
        for number, share in enumerate(shares)
    ]
    whole = torch.zeros(size)
    works.append(load_algorithm("all_gather", "ring")(whole, torch.tensor([float(rank)]), async_op=True))
    assert all(work.wait() for work in works)
    assert all(work.is_completed() for work in works)
    return [share.tolist() for share in shares], whole.tolist()


def test_phases_in_the_background(world: Worlds) -> None:
    for rank, (shares, whole) in enumerate(world(3).run(scatter_and_gather_in_background)):
        assert shares == [[3 * (rank + 10.0 * number)] for number in range(3)]
        assert whole == [0.0, 1.0, 2.0]


def refuse_shares(rank: int, size: int, collective: str, output: tuple[int, ...], input_: tuple[int, ...]) -> None:
    """Call it on tensors of these shapes; those without dimensions differ in type."""
    other = torch.zeros(input_, dtype=torch.float32 if input_ else torch.int64)
    pair = (torch.zeros(output), other)
    load_algorithm(collective, "ring")(*pair)


@pytest.mark.parametrize(
    ("collective", "output", "input_", "message"),
    [
        ("reduce_scatter", (2,), (3,), "3 elements are not 1 shares of 2"),
        ("all_gather", (3,), (2,), "3 elements are not 1 shares of 2"),
        ("all_gather", (), (), "float32 and int64: input and output must have the same type"),
        ("reduce_scatter", (), (), "int64 and float32: input and output must have the same type"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    collective: str, output: tuple[int, ...], input_: tuple[int, ...], message: str, world: Worlds
) -> None:
    with pytest.raises(RankFailed, match=message):
        world(1).run(refuse_shares, collective, output, input_)
