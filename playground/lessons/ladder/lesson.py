"""From `average_gradients` to DistributedDataParallel, rung by rung, each measured.

    python -m playground ladder
    python -m playground ladder --model resnet18 --steps 20 --batch-size 32
    python -m playground ladder --model bert
    python -m playground ladder -n 4 --bucket-cap-mb 0.02 --all-reduce ring

All train the same model on the same batches with the same dropout masks. In every round each takes one step, in an
order that changes, so that whatever else the machine does meets all of them. In the same rounds each also averages
gradients without a backward to hide behind, which shows how much of that it hides in its steps.
`--bucket-cap-mb` holds for the rungs and for DistributedDataParallel. `--all-reduce` is for the rungs:
DistributedDataParallel has the backend's.
Every rung is in playground/training/sync.py or in the lesson zero, and is what `sgd --sync` takes; that for embeddings
is in sparse_embeddings.py. The measurement is in measure.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from playground.lessons.ladder.measure import in_ddp, measure
from playground.lessons.ladder.page import MODELS, LadderSettings, candidates
from playground.lessons.ladder.sparse_embeddings import SparseEmbeddings
from playground.measurement import Fields
from playground.runtime import device, host
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.training.grad_syncs import DDP, SPARSE
from playground.training.replicas import broadcast_parameters
from playground.training.sync import AllReduce, GradSync, new_grad_sync


def new_rung(name: str, model: nn.Module, all_reduce: AllReduce, bucket_cap: int) -> GradSync:
    """The gradient synchronisation of that name for `model`; `bucket_cap` is the bytes of a full bucket."""
    if name == SPARSE:
        return SparseEmbeddings(model, all_reduce, bucket_cap)
    if name == DDP:
        return in_ddp(model, bucket_cap)
    return new_grad_sync(name, model, all_reduce=all_reduce, bucket_cap=bucket_cap)


def run(rank: int, size: int, settings: LadderSettings) -> Fields:
    """Train the model on every rung, and in DistributedDataParallel, with a clock on each. All ranks return the same.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    torch.manual_seed(settings.seed)
    model = MODELS[settings.model]().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(model)
    names = candidates(settings.model, settings.link)
    rungs = {name: partial(new_rung, name, bucket_cap=settings.bucket_cap) for name in names}
    return measure(rungs, model, settings)
