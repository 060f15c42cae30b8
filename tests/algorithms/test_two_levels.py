"""The all-reduce in two levels, on any number of hosts: right, the same bits everywhere, and as
cheap as it says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_tensors import agree, any_tensor, bits_of, data_for, few
from fixtures import Worlds
from hypothesis import given, strategies as st
from ranks import all_reduce_in_group, observed

from playground.algorithms import ALGORITHMS, executor, load_all_reduce, messages
from playground.algorithms.all_reduce import (
    choose,
    halving_doubling,
    hierarchical,
    pipelined_ring,
    recursive_doubling,
)
from playground.algorithms.collectives import AllReduce
from playground.algorithms.cost_model import RING_PIECE, Machine, Task, hierarchical_cost
from playground.algorithms.executor import Addressed, Executor
from playground.algorithms.messages import hosts_of
from playground.base.host import host_id, ranks_by_host
from playground.world import RankFailed, UsageError

Layout = tuple[int, ...]
"""Every rank's host."""


@contextmanager
def on_hosts(layout: Layout) -> Iterator[None]:
    """Have our algorithms take the ranks of the world as lying on these hosts."""
    hosts = ranks_by_host(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(messages._hosts, dist.group.WORLD, hosts)
        patch.setitem(messages._segments, dist.group.WORLD, "they send messages")
        yield


def blocks(size: int, node: int) -> Layout:
    """`node` ranks per host, one after the other; the last host has what is left."""
    return tuple(rank // node for rank in range(size))


def compare_on_hosts(rank: int, size: int, cases: list[Any]) -> list[tuple[bool, bytes]]:
    """For each case, whether the result is that of the backend, and its bits."""
    outcomes = []
    for name, layout, shape, stride, (dtype, op), seed in cases:
        ours = data_for(rank, shape, stride, dtype, seed)
        theirs = ours.clone(memory_format=torch.contiguous_format)
        if op == "AVG":
            dist.all_reduce(theirs)
            theirs /= size
        else:
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op))
        with on_hosts(layout):
            load_all_reduce(name)(ours, getattr(dist.ReduceOp, op))
        outcomes.append((agree(ours, theirs, dtype), bits_of(ours)))
    return outcomes


@pytest.mark.parametrize(
    "size", [4, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 2, 3, 5, 6, 7, 8))]
)
def test_on_any_hosts_it_is_all_reduce(size: int, world: Worlds) -> None:
    """Equal numbers of ranks per host or not, consecutive ranks or not; `auto` takes it there
    too."""
    layouts = st.tuples(*[st.integers(0, size - 1)] * size)
    cases = st.tuples(st.sampled_from(["hierarchical", "auto"]), layouts, *any_tensor)

    @few
    @given(st.lists(cases, min_size=30, max_size=30))
    def compare(drawn: list[Any]) -> None:
        by_rank = world(size).run(compare_on_hosts, drawn)
        for case, outcomes in zip(drawn, zip(*by_rank, strict=True), strict=True):
            assert all(right for right, _ in outcomes), case
            assert len({bits for _, bits in outcomes}) == 1, case

    compare()


def large_on_hosts(rank: int, size: int, layout: Layout, numel: int, batched: bool) -> bool:
    tensor = torch.arange(numel, dtype=torch.int32) * (rank + 1)
    with on_hosts(layout), pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "IN_BATCHES", {"cpu"} if batched else set())
        load_all_reduce("hierarchical")(tensor)
    return torch.equal(tensor, torch.arange(numel, dtype=torch.int32) * sum(range(size + 1)))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("layout", [(0, 1, 1, 1), (0, 1, 0, 1)])
def test_large_tensors_in_many_pieces(layout: Layout, batched: bool, world: Worlds) -> None:
    """Also where messages go in batches, as on nccl."""
    assert world(4).run(large_on_hosts, layout, RING_PIECE + 7, batched) == [True] * 4


def count_on_hosts(
    rank: int, size: int, asked: list[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """For each (ranks per host, bytes): (to which rank, bytes) of all that this rank sends."""
    sent: list[list[tuple[int, int]]] = []

    def note(send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        sent[-1].extend((to, part.nbytes) for part, to in send)

    with observed(note):
        for node, nbytes in asked:
            sent.append([])
            with on_hosts(blocks(size, node)):
                load_all_reduce("hierarchical")(torch.zeros(nbytes // 4))
    return sent


@pytest.mark.parametrize(
    "size", [4, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 3, 5, 6, 7, 8))]
)
def test_the_cost_is_that_of_the_messages_really_sent(size: int, world: Worlds) -> None:
    """In all; and what leaves a host is, on equal hosts, 2 (H - 1) / H tensors for all its ranks
    together."""
    asked = [(node, nbytes) for node in range(1, size + 1) for nbytes in (4, 840 * 4)]
    by_rank = world(size).run(count_on_hosts, asked)
    for position, (node, nbytes) in enumerate(asked):
        sent = [(rank, *message) for rank in range(size) for message in by_rank[rank][position]]
        total = hierarchical_cost(Task(size, nbytes, node)).total
        assert (total.messages, total.bytes) == (len(sent), sum(bytes_ for _, _, bytes_ in sent)), (
            node,
            nbytes,
        )
        hosts = size // node
        if size == hosts * node and nbytes == 840 * 4:
            left = sum(bytes_ for rank, to, bytes_ in sent if rank // node == 0 != to // node)
            assert left == pytest.approx(2 * (hosts - 1) / hosts * nbytes)


@pytest.mark.parametrize(
    ("size", "node", "between", "inside"),
    [(8, 4, 2, 6), (8, 8, 0, 14), (8, 1, 14, 0), (12, 4, 4, 6), (5, 3, 8, 0)],
)
def test_messages_on_the_critical_path(size: int, node: int, between: int, inside: int) -> None:
    """Two rings; the pipelined ring where the last host has fewer ranks."""
    cost = hierarchical_cost(Task(size, 1 << 20, node))
    assert (cost.between.messages, cost.inside.messages) == (between, inside)


@pytest.mark.parametrize(("size", "node"), [(4, 2), (8, 2), (8, 4), (32, 4)])
@pytest.mark.parametrize(
    ("nbytes", "expected"), [(4, recursive_doubling), (16 << 20, hierarchical)]
)
def test_auto_takes_what_wins_in_the_model(
    size: int, node: int, nbytes: int, expected: AllReduce
) -> None:
    """10 Gbit/s between hosts, ten times as much inside."""
    two_levels = Machine(5e-5, 8e-10, 1e-11, None, node, 5e-6, 8e-11)
    costs = {spec.code.load(): spec.cost.load() for spec in ALGORITHMS.values() if spec.cost}
    seconds = {
        code: two_levels.seconds(cost(Task(size, nbytes, node))) for code, cost in costs.items()
    }
    assert min(seconds, key=seconds.__getitem__) is expected
    assert choose(nbytes, size, size // node) is expected


@pytest.mark.parametrize("size", range(2, 18))
def test_auto_halves_only_where_nobody_sits_out(size: int) -> None:
    """Elsewhere a whole tensor goes in and out beside the halves."""
    assert choose(800 * 1024, size, 1) is (
        halving_doubling if size in (2, 4, 8, 16) else pipelined_ring
    )


def test_auto_needs_two_levels_for_it() -> None:
    assert choose(16 << 20, 8, 1) is choose(16 << 20, 8, 8) is pipelined_ring


def groups_by_host(rank: int, size: int, members: list[int]) -> tuple[tuple[int, ...], ...] | None:
    """The hosts of a group of these ranks, asked twice: the second time nothing is sent."""
    group: Any = dist.new_group(members)
    if rank not in members:
        return None
    first = hosts_of(group, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "start", None)
        assert hosts_of(group, torch.device("cpu")) is first
    return first


def test_ranks_find_out_who_shares_their_host(world: Worlds) -> None:
    assert world(3).run(groups_by_host, [0, 1, 2]) == [((0, 1, 2),)] * 3
    assert world(3).run(groups_by_host, [0, 2]) == [((0, 1),), None, ((0, 1),)]


def test_simulated_hosts(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank in the world, whatever the group; as evenly as they can be shared out."""
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    assert world(4).run(groups_by_host, [0, 1, 2, 3]) == [((0, 1), (2, 3))] * 4
    assert world(4).run(groups_by_host, [1, 2, 3]) == [None, *[((0,), (1, 2))] * 3]
    assert world(5).run(groups_by_host, [0, 1, 2, 3, 4]) == [((0, 1, 2), (3, 4))] * 5
    monkeypatch.setenv("PLAYGROUND_HOSTS", "3")
    with pytest.raises((UsageError, RankFailed), match=r"PLAYGROUND_HOSTS=3 is outside \[1, 3\)"):
        world(2).run(groups_by_host, [0, 1])


def test_ranks_of_several_hosts_add_up_all(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a host share memory with each other, and not with the others."""
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    names = [*ALGORITHMS]
    assert (
        world(4).run(all_reduce_in_group, [0, 1, 2, 3], names) == [dict.fromkeys(names, 10.0)] * 4
    )


def test_a_host_has_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAYGROUND_HOSTS", raising=False)
    real = host_id()
    assert real == host_id()
    assert os.uname().nodename in real
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    ids = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        ids.append(host_id())
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert real not in ids
