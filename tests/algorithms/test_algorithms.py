"""Our collectives: equal to the backend's for every tensor, and as cheap as their docstrings say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_tensors import agree, any_tensor, bits_of, data_for, few
from hypothesis import given, strategies as st
from ranks import all_reduce_in_group, all_reduce_large

from playground.algorithms import ALGORITHMS, BACKEND, OURS, load_algorithm, load_all_reduce
from playground.algorithms.operation import check
from playground.algorithms.pipelined_ring import PIECE
from playground.testing import World

Worlds = Callable[..., World]
NAMES = sorted(ALGORITHMS)
cases = st.lists(st.tuples(st.sampled_from(NAMES), *any_tensor), min_size=100, max_size=100)


def compare_all_reduce(rank: int, size: int, cases: list[Any]) -> list[dict[str, Any]]:
    """Each case by our algorithm and by the backend: whether they agree, and the bits of ours."""
    outcomes = []
    for name, shape, layout, (dtype, op), seed in cases:
        ours = data_for(rank, shape, layout, dtype, seed)
        strides = ours.stride()
        theirs = ours.clone(memory_format=torch.contiguous_format)
        if op == "AVG":  # gloo has none that can be trusted
            dist.all_reduce(theirs)
            theirs /= size
        else:
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op))
        load_all_reduce(name)(ours, getattr(dist.ReduceOp, op))
        assert ours.stride() == strides
        outcomes.append({"right": agree(ours, theirs, dtype), "bits": bits_of(ours)})
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.stress) for size in (5, 6, 7, 8))])
def test_every_algorithm_is_all_reduce(size: int, world: Worlds) -> None:
    """Exact for integers, within rounding for floating point, and the same bits on every rank (but for one)."""

    @few
    @given(cases)
    def compare(drawn: list[Any]) -> None:
        results = world(size).run(compare_all_reduce, drawn)
        for position, case in enumerate(drawn):
            outcomes = [rank[position] for rank in results]
            assert all(outcome["right"] for outcome in outcomes), (size, case, outcomes)
            if ALGORITHMS[case[0]].same_bits:
                assert len({outcome["bits"] for outcome in outcomes}) == 1, (size, case)

    compare()


@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_in_many_pieces(size: int, world: Worlds) -> None:
    """Large enough for the ring to cut its chunks, and not divisible by anything."""
    numel = 3 * size * PIECE // 4 + 7
    assert world(size).run(all_reduce_large, numel, NAMES) == [dict.fromkeys(NAMES, True)] * size


@pytest.mark.parametrize("members", [[0], [1, 3], [3, 1, 0], [0, 1, 2, 3]])
def test_any_subgroup(members: list[int], world: Worlds) -> None:
    """A rank outside does nothing, and its tensor stays as it was."""
    total = float(sum(rank + 1 for rank in members))
    for rank, after in enumerate(world(4).run(all_reduce_in_group, members, NAMES)):
        assert after == dict.fromkeys(NAMES, total if rank in members else rank + 1.0)


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
    import torch
    import torch.distributed as dist

    with pytest.raises(ValueError, match=re.escape(message)):
        check(getattr(torch, dtype), getattr(dist.ReduceOp, op))


def test_every_name_leads_to_its_algorithm() -> None:
    import torch.distributed as dist

    assert load_all_reduce(BACKEND) is dist.all_reduce
    for collective, specs in OURS.items():
        for name, spec in specs.items():
            algorithm: Any = load_algorithm(collective, name)
            assert algorithm.algorithm is spec.code.load()
            assert algorithm is load_algorithm(collective, name)
            assert spec.name == name


def test_the_table_and_the_algorithms_do_without_torch(torch_is_imported: Callable[..., list[str]]) -> None:
    modules = {spec.code.module for specs in OURS.values() for spec in specs.values()}
    assert not torch_is_imported("playground.algorithms", *sorted(modules))
