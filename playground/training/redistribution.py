"""A training run that goes on with another number of ranks than the one that took its snapshot had."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from playground.runtime import UsageError
from playground.training.snapshots.fingerprint import Fingerprint
from playground.training.snapshots.folder import SnapshotFile
from playground.training.snapshots.snapshots import State

Combine = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""From what every rank of the run had counted, what this one goes on counting from."""


def redistribute(states: Sequence[State], rank: int, snapshot: SnapshotFile, combine: Combine) -> State:
    """What rank `rank` goes on with. Its own are only its random numbers: one that the run had not gets a seed that no
    other rank and no other step has, for every kind of device."""
    owns: list[Mapping[str, Any]] = [state.own for state in states]
    own = {**owns[min(rank, snapshot.size - 1)], "history": combine([each["history"] for each in owns])}
    if rank >= snapshot.size:
        seed = draw_seed(snapshot.fingerprint, rank, snapshot.step)
        own["random_numbers"] = dict.fromkeys(own["random_numbers"], seed)
    return State(shared=states[0].shared, own=own)


def draw_seed(fingerprint: Fingerprint, rank: int, step: int) -> int:
    """A seed that follows from the run, its own seed included, the rank and the step."""
    digest = hashlib.sha256(json.dumps([fingerprint, rank, step]).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def require_equal_replicas(snapshot: SnapshotFile, size: int, equal: bool) -> None:
    """Raise `UsageError` if another number of ranks cannot go on: when each has parameters of its own."""
    if not equal and size != snapshot.size:
        raise UsageError(
            f"snapshot {snapshot.folder} was taken by {snapshot.size}, and the ranks here are {size}: with "
            f"--sync-every, parameters are each rank's own, and nobody has those of another number: take -n "
            f"{snapshot.size}, or another folder"
        )


def describe_change(snapshot: SnapshotFile, size: int, epoch: int) -> str:
    """What of going on with `size` ranks is exact, and what is not."""
    return (
        f"going on with {size} rank{'s' * (size > 1)} from step {snapshot.step}, which {snapshot.size} took: "
        f"parameters, optimizer and position are exact;\n"
        f"which samples the rest of epoch {epoch} takes, dropout masks and rounding differ (not with --logical-ranks)"
    )
