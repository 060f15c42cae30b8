"""Ranks by their numbers, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def format_ranks(ranks: Iterable[int]) -> str:
    """The numbers, as a table or a prompt has them: 0-2, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def name_ranks(ranks: Collection[int]) -> str:
    """The ranks, as a sentence has them: rank 1; ranks 0-2, 5."""
    return f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
