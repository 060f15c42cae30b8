"""Do N ranks with B/N samples each equal one process with B? The proof, and four ways to break it.

    python -m playground prove
    python -m playground prove -n 3 --batch-size 64
    python -m playground prove -n 8 --all-reduce ring --bucket-cap-mb 0.001

Each rank computes two things: its part of the work of N ranks, and, alone, the whole work of one process. Both start
from the same weights and see the same batches, without dropout; after every step gradients and parameters are compared.
The ways to break it: prove_breaks.py, beside this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from playground.lab.side_by_side import (
    OneProcess,
    Replica,
    apart,
    batches,
    gradients,
    net,
    on_any_rank,
    parameters,
)
from playground.runtime import report
from playground.runtime.agreement import check_agreed
from playground.training.replicas import broadcast_parameters
from playground.training.rungs import RUNGS
from playground.training.settings import Settings, synchronised
from playground.training.sync import Sync

TYPES = {"float64": torch.float64, "float32": torch.float32}
NO_MEAN_GRADIENT = "parameters"
"""Where parameters are averaged, every rank steps by a gradient of its own: none is the mean, none can be compared."""


def run(rank: int, size: int, settings: Settings, steps: int) -> dict[str, Any]:
    """N ranks, by each way of staying one model, against one process with whole batches: the largest difference of any
    gradient, and of any parameter, on any rank, after each step.

    By type {epsilon, steps: [{step, largest: {gradients, parameters}, differences: {way: {gradients, parameters}}}]};
    `largest` is the size of what is compared. Every rank returns the same.
    """
    check_agreed({"steps": steps})
    proof = {name: compared(settings, steps, dtype) for name, dtype in TYPES.items()}
    report(part="equal", outcome=proof)
    return proof


def compared(settings: Settings, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same steps by one process and in every way by N ranks, in numbers of one type."""
    # cuDNN would round float32 to 10 bits (TF32) in some convolutions and not in others, as the batch's size suggests.
    with torch.backends.cudnn.flags(enabled=False):
        alone, together = OneProcess(net(settings.seed, dtype), settings), contestants(settings, dtype)
        figures = []
        for images, labels in batches(settings, steps, dtype):
            alone.step(images, labels)
            grads, params = gradients(alone), parameters(alone)
            figures.append([[apart(grads), apart(params)]])
            for one in together.values():
                one.step(images, labels)
                figures[-1].append([apart(gradients(one), grads), apart(parameters(one), params)])
    rows = [told(number, list(together), row) for number, row in enumerate(on_any_rank(figures), 1)]
    return {"epsilon": torch.finfo(dtype).eps, "steps": rows}


def contestants(settings: Settings, dtype: torch.dtype) -> dict[str, Replica]:
    """A replica for every rung, one whose parameters are averaged, and one in DistributedDataParallel.

    Each rank draws weights of its own; those of rank 0 are the ones that one process starts from. (Gradients are added
    up with `settings.all_reduce`, but for DistributedDataParallel's, which are with the backend's own.)
    """
    seed, replicas = settings.seed + dist.get_rank(), {}
    for name in (*RUNGS, "parameters"):
        model = net(seed, dtype)
        broadcast_parameters(model)
        replicas[name] = Replica(model, settings, synchronised(model, replace(settings, sync=name)))
    model = DistributedDataParallel(net(seed, dtype), bucket_cap_mb=settings.bucket_cap / 2**20)
    return {**replicas, "ddp": Replica(model, settings, Sync(model))}


def told(number: int, names: list[str], row: list[list[float]]) -> dict[str, Any]:
    """The figures of one step, by their names."""
    largest, *differences = ({"gradients": grads, "parameters": params} for grads, params in row)
    by_name: dict[str, Any] = dict(zip(names, differences, strict=True))
    by_name[NO_MEAN_GRADIENT]["gradients"] = None
    return {"step": number, "largest": largest, "differences": by_name}
