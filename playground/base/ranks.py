"""Ranks by their numbers, in words."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def format_ranks(ranks: Iterable[int]) -> str:
    """The numbers, as a table or a prompt has them: 0-2, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def group_alike(things: Mapping[int, T]) -> dict[T, list[int]]:
    """The ranks of each thing, from the lowest rank on."""
    ranks: dict[T, list[int]] = {}
    for rank, thing in sorted(things.items(), key=lambda item: item[0]):
        ranks.setdefault(thing, []).append(rank)
    return ranks


def name_ranks(ranks: Collection[int]) -> str:
    """The ranks, as a sentence has them: rank 1; ranks 0-2, 5."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
