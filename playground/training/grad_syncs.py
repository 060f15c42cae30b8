"""Gradient synchronisation: every way to keep the replicas of a model equal, by name, naive first.

Importing this does not import torch. A new one is a function or class and an entry here:
`bench steps` and the tests derive from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.base.remote import Remote, remote


@dataclass(frozen=True)
class GradSyncSpec:
    """One way to synchronise gradients."""

    name: str
    code: Remote
    """A function `average(model, **needs)` that is called after backward, or a `GradSync` class
    made with the same."""
    summary: str
    """The change it makes, in one line."""
    needs: tuple[str, ...]
    """Which settings of a training run it takes, and which collectives."""
    takes_step: bool = False
    """Whether the optimizer is part of it: `GradSync.optimizer` is another than was asked for."""


DDP, SPARSE = "ddp", "sparse-embeddings"
"""What is measured beside these: DistributedDataParallel, and `SparseEmbeddings` where a model has
embeddings."""
ALL_REDUCE = ("all_reduce",)
# These leave the mean of the gradients in every `param.grad`.
OF_GRADIENTS = (
    GradSyncSpec("per-parameter", remote("playground.training.averaging:per_parameter"),
                 "one all_reduce per parameter, after backward: the tutorial's loop",
                 needs=ALL_REDUCE),
    GradSyncSpec("none-safe", remote("playground.training.averaging:none_safe"),
                 "the same, and a gradient that is None takes part as zero",
                 needs=ALL_REDUCE),
    GradSyncSpec("flat", remote("playground.training.averaging:flat"),
                 "one all_reduce for all gradients, copied into one message",
                 needs=ALL_REDUCE),
    GradSyncSpec("bucketed", remote("playground.training.averaging:bucketed"),
                 "one all_reduce per bucket of gradients, the last layers' first",
                 needs=(*ALL_REDUCE, "bucket_cap")),
    GradSyncSpec("overlapped", remote("playground.training.sync:OverlappedSync"),
                 "each bucket leaves as soon as its gradients are ready, while backward goes on",
                 needs=(*ALL_REDUCE, "bucket_cap")),
)  # fmt: skip
OF_PARAMETERS = (
    GradSyncSpec("parameters", remote("playground.training.sync:LocalSGD"),
                 "local SGD: each rank steps by its own gradients, then parameters are averaged",
                 needs=(*ALL_REDUCE, "sync_every")),
    GradSyncSpec("flat-step", remote("playground.training.flat_step:FlatStep"),
                 "one all_reduce for all gradients, and the optimizer's step on one flat tensor",
                 needs=ALL_REDUCE, takes_step=True),
    GradSyncSpec("shared-step", remote("playground.training.flat_step:new_shared_step"),
                 "zero-1 in memory that the ranks share: the parameters lie there once",
                 needs=ALL_REDUCE, takes_step=True),
    GradSyncSpec("zero-1", remote("playground.training.zero_sync:Zero1Sync"),
                 "reduce-scatter the gradients, step for a shard of the parameters, all-gather",
                 needs=(), takes_step=True),
    GradSyncSpec("zero-2", remote("playground.training.zero_sync:Zero2Sync"),
                 "each layer's gradients are reduced to their owners while backward goes on",
                 needs=(), takes_step=True),
    GradSyncSpec("zero-3", remote("playground.training.zero_sync:Zero3Sync"),
                 "and each layer's parameters are gathered when they are needed: FSDP",
                 needs=(), takes_step=True),
)  # fmt: skip
GRAD_SYNCS = {each.name: each for each in OF_GRADIENTS + OF_PARAMETERS}
