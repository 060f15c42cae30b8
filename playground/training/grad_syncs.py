"""Gradient synchronisation: every way to keep the replicas of a model equal, by name, naive first.

Importing this does not import torch. A new one is a function or class in a file of its own, and an entry here: choices,
help, ladder, prove and the tests derive from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class GradSyncSpec:
    name: str
    summary: str
    """The change it makes, in one line."""
    code: Remote
    """A function `average(model, **needs)` that is called after backward, or a `GradSync` class made with the same."""
    needs: tuple[str, ...] = ("all_reduce",)
    """Which settings of a training run it takes, and which collectives."""
    rung: bool = True
    """Whether it averages gradients, and so is a rung of the ladder to DistributedDataParallel."""


GRAD_SYNCS = {
    spec.name: spec
    for spec in (
        GradSyncSpec(
            name="per-parameter",
            summary="one all_reduce per parameter, after backward: the tutorial's loop",
            code=remote("playground.training.gradients:average_gradients_per_parameter"),
        ),
        GradSyncSpec(
            name="none-safe",
            summary="the same, and a gradient that is None takes part as zero",
            code=remote("playground.training.gradients:average_gradients_none_safe"),
        ),
        GradSyncSpec(
            name="flat",
            summary="one all_reduce for all gradients, copied into one message",
            code=remote("playground.training.gradients:average_gradients_flat"),
        ),
        GradSyncSpec(
            name="bucketed",
            summary="one all_reduce per bucket of gradients, the last layers' first",
            code=remote("playground.training.gradients:average_gradients_bucketed"),
            needs=("all_reduce", "bucket_cap"),
        ),
        GradSyncSpec(
            name="hierarchical",
            summary="all gradients in one message, added up inside pairs of ranks, then between the pairs",
            code=remote("playground.training.hierarchical:HierarchicalAverage"),
            needs=("all_reduce", "broadcast"),
        ),
        GradSyncSpec(
            name="overlapped",
            summary="each bucket leaves as soon as its gradients are ready, while backward goes on",
            code=remote("playground.training.overlap:OverlappedAverage"),
            needs=("all_reduce", "bucket_cap"),
        ),
        GradSyncSpec(
            name="parameters",
            summary="local SGD: each rank steps by its own gradients, then parameters are averaged",
            code=remote("playground.training.sync:AverageParameters"),
            needs=("all_reduce", "sync_every"),
            rung=False,
        ),
    )
}
RUNGS = {name: spec for name, spec in GRAD_SYNCS.items() if spec.rung}
"""The rungs of the ladder from the tutorial's loop to DistributedDataParallel."""
