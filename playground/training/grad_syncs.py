"""Gradient synchronisation: every way to keep the replicas of a model equal, by name, naive first.

Importing this does not import torch. A new one is a function or class and an entry here:
`bench steps` and the tests derive from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.base.remote import Remote, remote


@dataclass(frozen=True)
class GradSyncSpec:
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
    ("per-parameter", remote("playground.training.averaging:per_parameter"), ALL_REDUCE,
     "one all_reduce per parameter, after backward: the tutorial's loop"),
    ("none-safe", remote("playground.training.averaging:none_safe"), ALL_REDUCE,
     "the same, and a gradient that is None takes part as zero"),
    ("flat", remote("playground.training.averaging:flat"), ALL_REDUCE,
     "one all_reduce for all gradients, copied into one message"),
    ("bucketed", remote("playground.training.averaging:bucketed"), (*ALL_REDUCE, "bucket_cap"),
     "one all_reduce per bucket of gradients, the last layers' first"),
    ("overlapped", remote("playground.training.sync:OverlappedSync"), (*ALL_REDUCE, "bucket_cap"),
     "each bucket leaves as soon as its gradients are ready, while backward goes on"),
)  # fmt: skip
OF_PARAMETERS = (
    ("parameters", remote("playground.training.sync:LocalSGD"), (*ALL_REDUCE, "sync_every"),
     "local SGD: each rank steps by its own gradients, then parameters are averaged"),
    ("flat-step", remote("playground.training.flat_step:FlatStep"), ALL_REDUCE,
     "one all_reduce for all gradients, and the optimizer's step on one flat tensor"),
    ("shared-step", remote("playground.training.flat_step:new_shared_step"), ALL_REDUCE,
     "zero-1 in memory that the ranks share: the parameters lie there once"),
    ("zero-1", remote("playground.training.zero_sync:Zero1Sync"), (),
     "reduce-scatter the gradients, step for a shard of the parameters, all-gather"),
    ("zero-2", remote("playground.training.zero_sync:Zero2Sync"), (),
     "each layer's gradients are reduced to their owners while backward goes on"),
    ("zero-3", remote("playground.training.zero_sync:Zero3Sync"), (),
     "and each layer's parameters are gathered when they are needed: FSDP"),
)  # fmt: skip
GRAD_SYNCS = {
    name: GradSyncSpec(name, code, summary, needs) for name, code, needs, summary in OF_GRADIENTS
} | {
    name: GradSyncSpec(name, code, summary, needs, takes_step=name != "parameters")
    for name, code, needs, summary in OF_PARAMETERS
}
