"""Our collectives: equal to the backend's for every tensor, and as cheap as their docstrings say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import algorithm_ranks as ranks
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from playground import launch
from playground.algorithms import ALGORITHMS, BACKEND, OURS, load_algorithm, load_all_reduce
from playground.algorithms.operation import check
from playground.algorithms.pipelined_ring import IN_FLIGHT, PIECE
from playground.runtime import RankFailed
from playground.testing import World

Worlds = Callable[..., World]
NAMES = sorted(ALGORITHMS)
SUMS = ("SUM", "PRODUCT", "MIN", "MAX")
OPS = {
    "float32": (*SUMS, "AVG"),
    "float64": (*SUMS, "AVG"),
    "float16": (*SUMS, "AVG"),
    "bfloat16": (*SUMS, "AVG"),
    "complex64": ("SUM", "AVG"),
    "uint8": (*SUMS, "BAND", "BOR", "BXOR"),
    "int8": (*SUMS, "BAND", "BOR", "BXOR"),
    "int32": (*SUMS, "BAND", "BOR", "BXOR"),
    "int64": (*SUMS, "BAND", "BOR", "BXOR"),
    "bool": ("MIN", "MAX", "BAND", "BOR"),
}
LAYOUTS = ("contiguous", "transposed", "every other")
any_tensor = (
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(LAYOUTS),
    st.sampled_from([(dtype, op) for dtype, ops in OPS.items() for op in ops]),
    st.integers(0, 2**16),
)
cases = st.lists(st.tuples(st.sampled_from(NAMES), *any_tensor), min_size=100, max_size=100)
cases_of_shares = st.lists(st.tuples(*any_tensor), min_size=100, max_size=100)
once = settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_algorithm_is_all_reduce(size: int, world: Worlds) -> None:
    """Exact for integers, within rounding for floating point, and the same bits on every rank (but for one)."""

    @once
    @given(cases)
    def compare(drawn: list[Any]) -> None:
        results = world(size).run(ranks.compare_all_reduce, drawn)
        for position, case in enumerate(drawn):
            outcomes = [rank[position] for rank in results]
            assert all(outcome["right"] for outcome in outcomes), (size, case, outcomes)
            if ALGORITHMS[case[0]].same_bits:
                assert len({outcome["bits"] for outcome in outcomes}) == 1, (size, case)

    compare()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("compare", [ranks.compare_reduce_scatter, ranks.compare_all_gather])
def test_each_phase_of_the_ring_is_a_collective(compare: Callable[..., Any], size: int, world: Worlds) -> None:
    """Reduce-scatter is `dist.reduce_scatter_tensor`, all-gather is `dist.all_gather_into_tensor`."""

    @once
    @given(cases_of_shares)
    def check_all(drawn: list[Any]) -> None:
        for outcomes in world(size).run(compare, drawn):
            wrong = [case for case, right in zip(drawn, outcomes, strict=True) if not right]
            assert not wrong, (size, wrong)

    check_all()


@pytest.mark.parametrize("members", [[0], [1, 3], [3, 1, 0], [0, 1, 2, 3]])
def test_phases_in_any_subgroup(members: list[int], world: Worlds) -> None:
    """Shares go by a rank's number in the group. A rank outside does nothing, and its tensors stay as they were."""
    outcomes = world(4).run(ranks.scatter_and_gather_in_group, members)
    members = sorted(members)  # as dist.new_group has them
    total = [len(members) * position + sum(members) for position in range(2 * len(members))]
    gathered = [number for member in members for number in (member, member + 1)]
    for rank, outcome in enumerate(outcomes):
        if rank not in members:
            assert outcome == {"share": [-1.0] * 2, "whole": [-1.0] * len(total)}
            continue
        first = 2 * members.index(rank)
        assert outcome == {"share": total[first : first + 2], "whole": gathered}


def test_phases_in_the_background(world: Worlds) -> None:
    for rank, (shares, whole) in enumerate(world(3).run(ranks.scatter_and_gather_in_background)):
        assert shares == [[3 * (rank + 10.0 * number)] for number in range(3)]
        assert whole == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_transport_will_do(size: int, world: Worlds, tmp_path: Path) -> None:
    """Messages that go through a file, one of them in pieces."""
    for right in world(size).run(ranks.all_by_another_transport, tmp_path, [3, PIECE // 8 + 1]):
        assert right == dict.fromkeys(right, True)


@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_in_many_pieces(size: int, world: Worlds) -> None:
    """Large enough for the ring to cut its chunks, and not divisible by anything."""
    numel = 3 * size * PIECE // 4 + 7
    assert world(size).run(ranks.all_reduce_large, numel, NAMES) == [dict.fromkeys(NAMES, True)] * size


@pytest.mark.parametrize("members", [[0], [1, 3], [3, 1, 0], [0, 1, 2, 3]])
def test_any_subgroup(members: list[int], world: Worlds) -> None:
    """A rank outside does nothing, and its tensor stays as it was."""
    total = float(sum(rank + 1 for rank in members))
    for rank, after in enumerate(world(4).run(ranks.all_reduce_in_group, members, NAMES)):
        assert after == dict.fromkeys(NAMES, total if rank in members else rank + 1.0)


def docstring_costs(collective: str, name: str) -> list[tuple[str, str, str]]:
    """(for which ranks, messages, bytes), as an algorithm's docstring has them: Python in N, S, P, E, K and rank."""
    text = load_algorithm(collective, name).__doc__ or ""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    return [(row[0].strip(), row[1].strip(), row[2].strip()) for row in rows[2:]]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_messages_and_bytes_are_what_docstrings_say(size: int, world: Worlds) -> None:
    numel = 840 * 8  # divisible by every size, and by every power of two among them
    names = [name for name in NAMES if name != "auto"]
    counted = {name: ("all_reduce", name) for name in names} | {
        collective: (collective, "ring") for collective in ("reduce_scatter", "all_gather")
    }
    power = 1 << (size.bit_length() - 1)
    for rank, counts in enumerate(world(size).run(ranks.count_messages, numel, names)):
        known: dict[str, Any] = {"N": size, "S": numel * 4, "P": power, "E": size - power, "K": 1, "rank": rank}
        for name, (collective, algorithm) in counted.items():
            row = next(row for row in docstring_costs(collective, algorithm) if eval(row[0], dict(known)))
            messages = eval(row[1], {**known, "log2": math.log2})
            nbytes = eval(row[2], {**known, "log2": math.log2, "messages": messages})
            assert (counts[name]["messages"], counts[name]["bytes"]) == (messages, pytest.approx(nbytes)), name


def test_the_pipelined_ring_needs_memory_for_two_pieces(world: Worlds) -> None:
    numel = 4 * PIECE  # 16 pieces' worth of float32
    for beside in world(2).run(ranks.memory_beside, "pipelined-ring", numel):
        assert 0 < beside <= IN_FLIGHT * PIECE


def test_the_ring_needs_memory_for_one_chunk(world: Worlds) -> None:
    assert world(3).run(ranks.memory_beside, "ring", 300) == [400] * 3


def test_a_rank_that_fails_inside_an_algorithm_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 3 failed: ValueError: no more") as caught:
        launch(ranks.fail_inside_all_reduce, 3)
    assert caught.value.rank == 1


def test_messages_of_the_user_are_left_alone(world: Worlds) -> None:
    assert world(2).run(ranks.receive_across_all_reduce, NAMES) == [["from the other"] * len(NAMES)] * 2


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
        world(1).run(ranks.refuse_shares, collective, output, input_)


def test_every_name_leads_to_its_algorithm() -> None:
    import torch.distributed as dist

    assert load_all_reduce(BACKEND) is dist.all_reduce
    for collective, specs in OURS.items():
        for name, spec in specs.items():
            algorithm: Any = load_algorithm(collective, name)
            assert algorithm.algorithm is spec.code.load()
            assert algorithm is load_algorithm(collective, name)
            assert spec.name == name


def test_the_table_and_the_algorithms_do_without_torch(torch_is_imported: Callable[..., bool]) -> None:
    modules = {spec.code.module for specs in OURS.values() for spec in specs.values()}
    assert not torch_is_imported("playground.algorithms", *sorted(modules))
