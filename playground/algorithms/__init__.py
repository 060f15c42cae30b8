"""Collectives written by ourselves: every algorithm in place of the function that torch.distributed has.

Importing this does not import torch. A new all-reduce is one file beside these, which holds the algorithm and its cost,
and an entry here: choices, help, the lesson, bench and scale derive from this table. S is the size of the tensor in
bytes, N the number of ranks, H that of hosts, and L = N / H.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True)
class AlgorithmSpec:
    """One algorithm for a collective. The function `code` is found by its name."""

    name: str
    sends: str
    """Bytes that a rank sends."""
    steps: str
    """One after the other."""
    good_for: str
    _: KW_ONLY
    place: str = ""
    """Its `module:function` in this folder, where the name does not say it."""

    @functools.cached_property
    def code(self) -> Remote:
        """The algorithm itself, over a flat tensor. `load_algorithm` makes it a collective."""
        word = self.name.replace("-", "_")
        return remote(f"playground.algorithms.{self.place or f'{word}:{word}'}")


@dataclass(frozen=True)
class AllReduceSpec(AlgorithmSpec):
    """One algorithm for all-reduce."""

    short_name: str = ""
    """A name that fits into a cell of a table; the name itself if there is none."""
    in_story: bool = False
    """Whether the lesson shows it step by step without being asked to."""
    same_bits: bool = True
    """Whether all ranks add in the same order, so that their sums are equal to the last bit."""
    needs_hosts: bool = False
    """Whether it differs from the others only where ranks are on several hosts."""
    has_messages: bool = True
    """Whether it sends messages of its own, which can be shown, and whose cost follows from the links."""

    @functools.cached_property
    def cost(self) -> Remote | None:
        """A function from a `Task` to its `Cost`."""
        return remote(f"{self.code.module}:{self.code.name}_cost") if self.has_messages else None


ALGORITHMS = {
    spec.name: spec
    for spec in (
        AllReduceSpec(
            "reduce-broadcast",
            "root (N - 1)·S, others S",
            "2 (N - 1) at the root",
            "understanding what is wrong with it",
            short_name="root",
            in_story=True,
        ),
        AllReduceSpec("all-to-all", "(N - 1)·S", "1", "two ranks", short_name="all", in_story=True),
        AllReduceSpec(
            "tutorial-ring",
            "(N - 1)·S",
            "N - 1",
            "reading tutorials",
            short_name="tutorial",
            in_story=True,
            same_bits=False,
        ),
        AllReduceSpec(
            "ring", "2 (N - 1) / N·S", "2 (N - 1)", "understanding reduce-scatter and all-gather", in_story=True
        ),
        AllReduceSpec(
            "pipelined-ring", "2 (N - 1) / N·S", "2 (N - 1), each of K pieces", "large tensors", short_name="piped"
        ),
        AllReduceSpec("recursive-doubling", "log2 N·S", "log2 N", "small tensors", short_name="doubling"),
        AllReduceSpec("halving-doubling", "2 (N - 1) / N·S", "2 log2 N", "what lies between", short_name="halving"),
        AllReduceSpec("binary-tree", "up to 3 S", "2 log2 N", "small tensors, many ranks", short_name="tree"),
        AllReduceSpec(
            "hierarchical",
            "2 (N - 1) / N·S, of it 2 (H - 1) / N·S to other hosts",
            "2 (L - 1) inside, 2 (H - 1) between hosts",
            "ranks on several hosts",
            short_name="levels",
            needs_hosts=True,
        ),
        AllReduceSpec(
            "shared-memory",
            "nothing",
            "1 to 2 per MiB",
            "ranks of one host",
            has_messages=False,
            place="auto:shared_memory",
        ),
        AllReduceSpec("auto", "what the chosen one does", "as many as it takes", "anything", has_messages=False),
    )
}
"""Our all-reduces, by name."""

REDUCE_SCATTERS = {
    "ring": AlgorithmSpec("ring", "(N - 1) / N·S", "N - 1", "large tensors", place="ring:reduce_scatter")
}
ALL_GATHERS = {"ring": AlgorithmSpec("ring", "(N - 1) / N·S", "N - 1", "large tensors", place="ring:all_gather")}

BACKEND = "backend"
ALL_REDUCES = (BACKEND, *ALGORITHMS)
"""The all-reduces to choose from: the backend's own, and ours."""

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
