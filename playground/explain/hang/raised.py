"""What ranks had raised that wait in `finally` or `except`. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from playground.base.ranks import group_alike, name_ranks
from playground.explain.hang.states import Doing, Kind, RankState
from playground.explain.hang.wait_graph import is_first_below
from playground.explain.hang.wording import Diagnosis


def note_raised(found: Diagnosis, states: Sequence[RankState]) -> Diagnosis:
    """The diagnosis, with the exceptions below which ranks wait, if others have raised none. If
    these ranks are at fault, so is what they call there."""
    below = {
        state.rank: state.error
        for state in states
        if state.doing in (Doing.IN_OPERATION, Doing.DEAD)
        and state.error
        and state.waits_for
        and is_first_below(state, state.waits_for)
    }
    if not below or len(below) == len(states):
        return found
    told = [
        f"{name_ranks(ranks)} had raised {error}" for error, ranks in group_alike(below).items()
    ]
    is_theirs = found.kind != Kind.STRANGER and below.keys() <= {*found.culprits}
    return replace(
        found,
        raised="; ".join(told),
        traceback=next(state.traceback for state in states if state.rank in below),
        cure=Kind.IN_FINALLY.cure if is_theirs else found.cure,
    )
