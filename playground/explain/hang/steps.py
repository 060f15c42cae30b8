"""Why ranks have not taken the same steps of a training with DistributedDataParallel, where the
counts of batches, forward and backward passes tell. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from playground.base.ranks import group_alike, name_ranks
from playground.explain.hang.states import BACKWARD, FORWARDS, UNUSED, RankState
from playground.explain.hang.wording import shorten

UNEQUAL = "{told} ({line}): give all ranks equal numbers, or `with model.join():`"
SKIPPED = "{told} ({line}): let all ranks decide alike which batches go without backward()"


def explain_counts(states: Collection[RankState]) -> str:
    """The cause and the cure if the counts of these ranks tell it, else empty."""
    known = sorted((state for state in states if not state.unnamed), key=lambda state: state.rank)
    if len(known) < 2:
        return ""
    return find_unequal(known) or find_unused(known)


def find_unequal(states: Sequence[RankState]) -> str:
    """Ranks go through data of unequal lengths in the same line, and those that have more batches
    have made more forward passes."""
    shared = {*states[0].batches}.intersection(*(state.batches for state in states))
    for line in sorted(shared):
        numbers = {state.rank: state.batches[line] for state in states}
        steps = [(state.batches[line], count(state, FORWARDS)) for state in states]
        first, last = min(steps), max(steps)
        if first[0] < last[0] and first[1] < last[1]:
            parts = [
                f"{name_ranks(ranks)} {'have' if ranks[1:] else 'has'} {number}"
                for number, ranks in group_alike(numbers).items()
            ]
            parts[0] += " batches"
            return UNEQUAL.format(told=", ".join(parts), line=place_of(line))
    return ""


def find_unused(states: Sequence[RankState]) -> str:
    """Ranks have made equally many forward passes, and some have gone on to the next one more often
    without a backward pass."""
    if len({count(state, FORWARDS) for state in states}) > 1:
        return ""
    fewest = min(count(state, UNUSED) for state in states)
    skipping = {
        state.rank: count(state, BACKWARD) for state in states if count(state, UNUSED) > fewest
    }
    line = next(
        (
            one.line
            for state in states
            for one in reversed(state.operations)
            if one.name == BACKWARD
        ),
        "",
    )
    if not skipping or not line:
        return ""
    forwards = count(states[0], FORWARDS)
    parts = [
        f"{name_ranks(ranks)} {'have' if ranks[1:] else 'has'} made {forwards} forward passes and "
        f"{number} backward {'passes' if number != 1 else 'pass'}"
        for number, ranks in group_alike(skipping).items()
    ]
    return SKIPPED.format(told=", ".join(parts), line=place_of(line))


def count(state: RankState, kind: str) -> int:
    """How often a rank has called this, in all groups."""
    return sum(number for channel, number in state.counts.items() if channel.kind == kind)


def place_of(line: str) -> str:
    return shorten(line.partition(" in ")[0], 24)
