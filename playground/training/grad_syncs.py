"""Gradient synchronisation: every way to keep the replicas of a model equal, by name, naive first.

Importing this does not import torch. A new one is a function or class in sync.py and an entry here: choices, help,
ladder, prove and the tests derive from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True)
class GradSyncSpec:
    name: str
    code: Remote
    """A function `average(model, **needs)` that is called after backward, or a `GradSync` class made with the same."""
    summary: str
    """The change it makes, in one line."""
    needs: tuple[str, ...] = ("all_reduce",)
    """Which settings of a training run it takes, and which collectives."""
    rung: bool = True
    """Whether it averages gradients, and so is a rung of the ladder to DistributedDataParallel."""


GRAD_SYNCS = {
    name: GradSyncSpec(
        name, remote(f"playground.training.sync:{code}"), summary, ("all_reduce", *more), rung=name != "parameters"
    )
    for name, code, more, summary in (
        ("per-parameter", "per_parameter", (), "one all_reduce per parameter, after backward: the tutorial's loop"),
        ("none-safe", "none_safe", (), "the same, and a gradient that is None takes part as zero"),
        ("flat", "flat", (), "one all_reduce for all gradients, copied into one message"),
        ("bucketed", "bucketed", ("bucket_cap",), "one all_reduce per bucket of gradients, the last layers' first"),
        ("overlapped", "Overlapped", ("bucket_cap",),
         "each bucket leaves as soon as its gradients are ready, while backward goes on"),
        ("parameters", "LocalSGD", ("sync_every",),
         "local SGD: each rank steps by its own gradients, then parameters are averaged"),
    )
}  # fmt: skip
RUNGS = {name: spec for name, spec in GRAD_SYNCS.items() if spec.rung}
"""The rungs of the ladder from the tutorial's loop to DistributedDataParallel."""
