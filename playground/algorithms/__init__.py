"""Collectives written by ourselves: every algorithm in place of the function that torch.distributed has.

Importing this does not import torch. A new all-reduce is one file beside these, which holds the algorithm and its cost,
and an entry here: choices, help, the lesson, bench and scale derive from this table. S is the size of the tensor in
bytes, N the number of ranks, H that of hosts, and L = N / H.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm for a collective."""

    name: str
    sends: str
    """Bytes that a rank sends."""
    steps: str
    """One after the other."""
    good_for: str
    code: Remote
    """The algorithm itself, over a flat tensor. `load_algorithm` makes it a collective."""


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec(AlgorithmSpec):
    """One algorithm for all-reduce."""

    cost: Remote | None = None
    """A function from a `Task` to its `Cost`; without one, `scale` leaves the algorithm out."""
    short_name: str = ""
    """A name that fits into a cell of a table; the name itself if there is none."""
    in_story: bool = False
    """Whether the lesson shows it step by step without being asked to."""
    same_bits: bool = True
    """Whether all ranks add in the same order, so that their sums are equal to the last bit."""
    needs_hosts: bool = False
    """Whether it differs from the others only where ranks are on several hosts."""
    chooses: bool = False
    """Whether it only chooses among the others, and so has no messages of its own to show."""


ALGORITHMS = {
    spec.name: spec
    for spec in (
        AllReduceSpec(
            name="reduce-broadcast",
            sends="root (N - 1)·S, others S",
            steps="2 (N - 1) at the root",
            good_for="understanding what is wrong with it",
            code=remote("playground.algorithms.reduce_broadcast:reduce_broadcast"),
            cost=remote("playground.algorithms.reduce_broadcast:reduce_broadcast_cost"),
            short_name="root",
            in_story=True,
        ),
        AllReduceSpec(
            name="all-to-all",
            sends="(N - 1)·S",
            steps="1",
            good_for="two ranks",
            code=remote("playground.algorithms.all_to_all:all_to_all"),
            cost=remote("playground.algorithms.all_to_all:all_to_all_cost"),
            short_name="all",
            in_story=True,
        ),
        AllReduceSpec(
            name="tutorial-ring",
            sends="(N - 1)·S",
            steps="N - 1",
            good_for="reading tutorials",
            code=remote("playground.algorithms.tutorial_ring:tutorial_ring"),
            cost=remote("playground.algorithms.tutorial_ring:tutorial_ring_cost"),
            short_name="tutorial",
            in_story=True,
            same_bits=False,
        ),
        AllReduceSpec(
            name="ring",
            sends="2 (N - 1) / N·S",
            steps="2 (N - 1)",
            good_for="understanding reduce-scatter and all-gather",
            code=remote("playground.algorithms.ring:ring"),
            cost=remote("playground.algorithms.ring:ring_cost"),
            in_story=True,
        ),
        AllReduceSpec(
            name="pipelined-ring",
            sends="2 (N - 1) / N·S",
            steps="2 (N - 1), each of K pieces",
            good_for="large tensors",
            code=remote("playground.algorithms.pipelined_ring:pipelined_ring"),
            cost=remote("playground.algorithms.pipelined_ring:pipelined_ring_cost"),
            short_name="piped",
        ),
        AllReduceSpec(
            name="recursive-doubling",
            sends="log2 N·S",
            steps="log2 N",
            good_for="small tensors",
            code=remote("playground.algorithms.recursive_doubling:recursive_doubling"),
            cost=remote("playground.algorithms.recursive_doubling:recursive_doubling_cost"),
            short_name="doubling",
        ),
        AllReduceSpec(
            name="halving-doubling",
            sends="2 (N - 1) / N·S",
            steps="2 log2 N",
            good_for="what lies between",
            code=remote("playground.algorithms.halving_doubling:halving_doubling"),
            cost=remote("playground.algorithms.halving_doubling:halving_doubling_cost"),
            short_name="halving",
        ),
        AllReduceSpec(
            name="binary-tree",
            sends="up to 3 S",
            steps="2 log2 N",
            good_for="small tensors, many ranks",
            code=remote("playground.algorithms.binary_tree:binary_tree"),
            cost=remote("playground.algorithms.binary_tree:binary_tree_cost"),
            short_name="tree",
        ),
        AllReduceSpec(
            name="hierarchical",
            sends="2 (N - 1) / N·S, of it 2 (H - 1) / N·S to other hosts",
            steps="2 (L - 1) inside, 2 (H - 1) between hosts",
            good_for="ranks on several hosts",
            code=remote("playground.algorithms.hierarchical:hierarchical"),
            cost=remote("playground.algorithms.hierarchical:hierarchical_cost"),
            short_name="levels",
            needs_hosts=True,
        ),
        AllReduceSpec(
            name="auto",
            sends="what the chosen one does",
            steps="as many as it takes",
            good_for="anything",
            code=remote("playground.algorithms.auto:auto"),
            chooses=True,
        ),
    )
}
"""Our all-reduces, by name."""

REDUCE_SCATTERS = {
    "ring": AlgorithmSpec(
        name="ring",
        sends="(N - 1) / N·S",
        steps="N - 1",
        good_for="large tensors",
        code=remote("playground.algorithms.ring:reduce_scatter"),
    )
}
ALL_GATHERS = {
    "ring": AlgorithmSpec(
        name="ring",
        sends="(N - 1) / N·S",
        steps="N - 1",
        good_for="large tensors",
        code=remote("playground.algorithms.ring:all_gather"),
    )
}

BACKEND = "backend"
ALL_REDUCES = (BACKEND, *ALGORITHMS)
"""What adds up over ranks: the backend's own all-reduce, and ours."""

OURS: Mapping[str, Mapping[str, AlgorithmSpec]] = {
    "all_reduce": ALGORITHMS,
    "reduce_scatter": REDUCE_SCATTERS,
    "all_gather": ALL_GATHERS,
}
"""Our algorithms by collective and by name."""


@functools.cache
def load_algorithm(collective: str, name: str) -> Callable[..., object]:
    """Our algorithm as a function with the signature of the one in torch.distributed. Imports torch.

    all_reduce: `(tensor, op, group, async_op)`, as `dist.all_reduce`; reduce_scatter: `(output, input, op, group,
    async_op)`, as `dist.reduce_scatter_tensor`; all_gather: `(output, input, group, async_op)`, as
    `dist.all_gather_into_tensor`. Raises `KeyError` for a name that is not in `OURS`.
    """
    from playground.algorithms.collectives import AllGather, AllReduce, ReduceScatter

    kinds = {"all_reduce": AllReduce, "reduce_scatter": ReduceScatter, "all_gather": AllGather}
    return kinds[collective](OURS[collective][name].code.load())


def load_all_reduce(name: str) -> Callable[..., object]:
    """The backend's own all-reduce or ours, of that name. Imports torch."""
    if name == BACKEND:
        import torch.distributed as dist

        return dist.all_reduce
    return load_algorithm("all_reduce", name)
