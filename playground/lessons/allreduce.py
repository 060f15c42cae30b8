"""All-reduce by hand: seven ways to leave the same sum on every rank, and what each costs.

    python -m playground allreduce
    python -m playground allreduce --algorithm ring -n 3 --elements 6

Rank r starts with 10 to the power r in every element (with more than 16 ranks it begins anew), so each digit of what a
rank holds says whose tensor is in it.
What is shown are the messages of the run itself, noted as they are sent. The tables hold for as many ranks and elements
as they have rows: `messages` and `sent` are what a rank sends, `sent` in bytes, eight an element.
The algorithms themselves: playground/algorithms/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from playground.algorithms import ALGORITHMS
from playground.algorithms.messages import Addressed, Messages, observed
from playground.runtime import device


def reduce_broadcast(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """All send to rank 0, which adds up and sends the sum back. The root's link carries everything.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 1        | 32   |
    """
    return noted("reduce-broadcast", rank, size, elements)


def all_to_all(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """Everybody sends everything to everybody: one step, no root, but N(N - 1) whole tensors on the way.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 3        | 96   |
    """
    return noted("all-to-all", rank, size, elements)


def tutorial_ring(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """Each passes on to the right what came from the left, whole, and adds it: neighbours only, but no fewer bytes.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 3        | 96   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 3        | 96   |
    """
    return noted("tutorial-ring", rank, size, elements)


def ring(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """In N chunks: first each chunk's sum is collected going round, then the sums go round. A rank sends less than two
    tensors, however many ranks there are.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 6        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 6        | 48   |
    """
    return noted("ring", rank, size, elements)


def recursive_doubling(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """Swap whole tensors with a neighbour, then with one 2 away, then 4: few steps, for tensors so small that only
    steps count.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 2        | 64   |
    """
    return noted("recursive-doubling", rank, size, elements)


def halving_doubling(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """Swap halves, then quarters, and add; then collect on the way back: the ring's bytes in fewer steps.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 4        | 48   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 4        | 48   |
    """
    return noted("halving-doubling", rank, size, elements)


def binary_tree(rank: int, size: int, elements: int | None = None) -> dict[str, Any]:
    """Sums go up a tree and the result comes down: no rank sends to more than three others, however many there are.

    | rank | before                   | after                    | messages | sent |
    |------|--------------------------|--------------------------|----------|------|
    | 0    | [1, 1, 1, 1]             | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 1    | [10, 10, 10, 10]         | [1111, 1111, 1111, 1111] | 2        | 64   |
    | 2    | [100, 100, 100, 100]     | [1111, 1111, 1111, 1111] | 1        | 32   |
    | 3    | [1000, 1000, 1000, 1000] | [1111, 1111, 1111, 1111] | 1        | 32   |
    """
    return noted("binary-tree", rank, size, elements)


def noted(algorithm: str, rank: int, size: int, elements: int | None) -> dict[str, Any]:
    """Run an algorithm on a small tensor, and note every message when it is started, and what this rank then holds."""
    tensor = torch.full((elements or size,), 10 ** (rank % 16), dtype=torch.int64, device=device())
    before, notes = tensor.tolist(), []

    def note(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        if send or receive:
            sent = [{"to": to, "values": part.tolist(), "where": place(part, messages.flat)} for part, to in send]
            received = [{"from": source, "where": place(part, messages.flat)} for part, source in receive]
            notes.append({"holds": messages.flat.tolist(), "sends": sent, "receives": received})

    with observed(note):
        ALGORITHMS[algorithm](tensor)
    parts = [len(message["values"]) for step in notes for message in step["sends"]]
    sent = sum(parts) * tensor.element_size()
    return {"before": before, "after": tensor.tolist(), "messages": len(parts), "sent": sent, "notes": notes}


def place(part: torch.Tensor, flat: torch.Tensor) -> list[int] | None:
    """[first, stop) of the elements of `flat` that `part` is; None for memory beside it."""
    first = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
    return [first, first + part.numel()] if 0 <= first < flat.numel() else None
