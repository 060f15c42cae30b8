"""Collectives written by ourselves: every algorithm in place of the function that torch.distributed
has.

Importing this does not import torch. A new all-reduce is a function in all_reduce.py, its cost one
in cost_model.py, and an entry here: choices, help, bench and scale derive from this table.

    all_reduce     our all-reduces, from the first idea to the fast ones
    collectives    an algorithm as a function with the signature of torch.distributed's
    messages       its parts: messages, and adding what has arrived
    executor       what starts them and adds, on a rank
    operation      the reduction operations that they support
    background     `async_op`: a collective that goes on in a thread
    shared_memory  collectives in memory that the ranks of a host share
    segment        that memory, and how ranks meet in it
    semaphores     those by which they meet
    cost_model     the time that an all-reduce takes, by the alpha-beta model
    bytes_sent     the bytes that a rank sends, by formulas
    traffic        the bytes that a rank sends, call by call
    link           a simulated link of a given speed
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from playground.base.remote import Remote, remote


@dataclass(frozen=True)
class AlgorithmSpec:
    """One algorithm for a collective."""

    name: str
    short_name: str = ""
    """A name that fits into a cell of a table; the name itself if there is none."""
    same_bits: bool = True
    """Whether all ranks add in the same order, so that their sums are equal to the last bit."""
    needs_hosts: bool = False
    """Whether it differs from the others only where ranks are on several hosts."""
    has_messages: bool = True
    """Whether it sends messages of its own, which can be shown, and whose cost follows from the
    links."""
    function: str = ""
    """Its function in all_reduce.py, where the name does not say it."""

    @functools.cached_property
    def code(self) -> Remote:
        """The collective, with the signature of the function that torch.distributed has."""
        return remote(
            f"playground.algorithms.all_reduce:{self.function or self.name.replace('-', '_')}"
        )

    @functools.cached_property
    def cost(self) -> Remote | None:
        """The cost of an all-reduce: a function from a `Task` to a `Cost`."""
        if not self.has_messages:
            return None
        return remote(f"playground.algorithms.cost_model:{self.code.name}_cost")


ALGORITHMS = {
    spec.name: spec
    for spec in (
        AlgorithmSpec("reduce-broadcast", short_name="root"),
        AlgorithmSpec("all-to-all", short_name="all"),
        AlgorithmSpec("tutorial-ring", short_name="tutorial", same_bits=False),
        AlgorithmSpec("ring"),
        AlgorithmSpec("pipelined-ring", short_name="piped"),
        AlgorithmSpec("recursive-doubling", short_name="doubling"),
        AlgorithmSpec("halving-doubling", short_name="halving"),
        AlgorithmSpec("binary-tree", short_name="tree"),
        AlgorithmSpec("hierarchical", short_name="levels", needs_hosts=True),
        AlgorithmSpec("shared-memory", has_messages=False),
        AlgorithmSpec("auto", has_messages=False),
    )
}
"""Our all-reduces, by name."""

BACKEND = "backend"
ALL_REDUCES = (BACKEND, *ALGORITHMS)
"""The all-reduces to choose from: the backend's own, and ours."""

ALGORITHMS_BY_COLLECTIVE: Mapping[str, Mapping[str, AlgorithmSpec]] = {
    "all_reduce": ALGORITHMS,
    "reduce_scatter": {"ring": AlgorithmSpec("ring", function="ring_reduce_scatter")},
    "all_gather": {"ring": AlgorithmSpec("ring", function="ring_all_gather")},
}
"""Our algorithms by collective and by name."""


def load_algorithm(collective: str, name: str) -> Callable[..., object]:
    """Our algorithm as a function with the signature of the one in torch.distributed. Imports
    torch.

    all_reduce: `(tensor, op, group, async_op)`, as `dist.all_reduce`; reduce_scatter: `(output,
    input, op, group, async_op)`, as `dist.reduce_scatter_tensor`; all_gather: `(output, input,
    group, async_op)`, as `dist.all_gather_into_tensor`. Raises `KeyError` for a name that is not in
    `ALGORITHMS_BY_COLLECTIVE`.
    """
    code: Callable[..., object] = ALGORITHMS_BY_COLLECTIVE[collective][name].code.load()
    return code


def load_all_reduce(name: str) -> Callable[..., object]:
    """The backend's own all-reduce or ours, of that name. Imports torch."""
    if name == BACKEND:
        import torch.distributed as dist

        return dist.all_reduce
    return load_algorithm("all_reduce", name)
