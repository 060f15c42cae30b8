"""All-reduce by hand: the ways to leave the same sum on every rank, and what each costs.

    python -m playground allreduce
    python -m playground allreduce --algorithm ring -n 3 --elements 6
    python -m playground allreduce --algorithm reduce-scatter

Rank r starts with 10 to the power r in every element (with more than 16 ranks it begins anew), so each digit of what a
rank holds says whose tensor is in it.
What is shown are the messages of the run itself, recorded as they are sent. The tables hold for as many ranks and
elements as they have rows: `messages` and `sent` are what a rank sends, `sent` in bytes, eight per element.
The algorithms themselves are in playground/algorithms/, one per file; the first to read is ring.py.
"""

from __future__ import annotations

from playground.lessons.all_reduce.results import Trace
from playground.lessons.all_reduce.trace import trace


def reduce_broadcast(rank: int, size: int, elements: int | None = None) -> Trace:
    """All send to rank 0, which adds up and sends the sum back. The root's link carries everything.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 1        | 32   |
    """
    return trace("reduce-broadcast", rank, size, elements)


def all_to_all(rank: int, size: int, elements: int | None = None) -> Trace:
    """Everybody sends everything to everybody: one step, no root, but N(N-1) whole tensors on the wire.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 3        | 96   |
    """
    return trace("all-to-all", rank, size, elements)


def tutorial_ring(rank: int, size: int, elements: int | None = None) -> Trace:
    """Each passes on to the right what came from the left, whole, and adds it: neighbours only, but no fewer bytes.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 3        | 96   |
    """
    return trace("tutorial-ring", rank, size, elements)


def ring(rank: int, size: int, elements: int | None = None) -> Trace:
    """In N chunks: a reduce-scatter leaves the sum of chunk r on rank r, then an all-gather takes every sum to every
    rank. A rank sends less than two tensors, however many ranks there are.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    return trace("ring", rank, size, elements)


def reduce_scatter(rank: int, size: int, elements: int | None = None) -> Trace:
    """The ring's first phase by itself: each chunk goes once round and every rank adds its own to it. Rank r keeps the
    sum of chunk r.

    | rank | before                   | after  | messages | sent |
    |------|--------------------------|--------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111] | 3        | 24   |
    | 1    | [10, 10, 10, 10]         | [1111] | 3        | 24   |
    | 2    | [100, 100, 100, 100]     | [1111] | 3        | 24   |
    | 3    | [1000, 1000, 1000, 1000] | [1111] | 3        | 24   |
    """
    return trace("reduce-scatter", rank, size, elements)


def all_gather(rank: int, size: int, elements: int | None = None) -> Trace:
    """The ring's second phase by itself: rank r starts with chunk r, each chunk goes once round, and every rank keeps
    it.

    | rank | before | after              | messages | sent |
    |------|--------|--------------------|----------|------|
    | 0    | [1]    | [1, 10, 100, 1000] | 3        | 24   |
    | 1    | [10]   | [1, 10, 100, 1000] | 3        | 24   |
    | 2    | [100]  | [1, 10, 100, 1000] | 3        | 24   |
    | 3    | [1000] | [1, 10, 100, 1000] | 3        | 24   |
    """
    return trace("all-gather", rank, size, elements)


def pipelined_ring(rank: int, size: int, elements: int | None = None) -> Trace:
    """The ring, tuned: long chunks travel in pieces, and a piece goes on as soon as it is added. On tensors as short as
    these, the same messages as the ring's.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    return trace("pipelined-ring", rank, size, elements)


def recursive_doubling(rank: int, size: int, elements: int | None = None) -> Trace:
    """Swap whole tensors with a neighbour, then with one 2 away, then 4: few steps, for tensors so small that only
    steps count.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 2        | 64   |
    """
    return trace("recursive-doubling", rank, size, elements)


def halving_doubling(rank: int, size: int, elements: int | None = None) -> Trace:
    """Swap halves, then quarters, and add; then collect on the way back: the ring's bytes in fewer steps.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 4        | 48   |
    """
    return trace("halving-doubling", rank, size, elements)


def binary_tree(rank: int, size: int, elements: int | None = None) -> Trace:
    """Sums go up a tree and the result comes down: no rank sends to more than three others, however many there are.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 1        | 32   |
    """
    return trace("binary-tree", rank, size, elements)


def hierarchical(rank: int, size: int, elements: int | None = None) -> Trace:
    """In two levels: sums of shares inside each host, of each share between hosts, then collected inside each host. Few
    bytes leave a host. On one host it is the ring; PLAYGROUND_HOSTS=2 in the environment shows it on two.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    return trace("hierarchical", rank, size, elements)


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("allreduce")
