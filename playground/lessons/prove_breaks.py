"""Four ways by which N ranks are not one process, as they happen in practice, each with its number.

    python -m playground prove

Each comes with what must hold if its explanation is right (a difference that is rounding, and no more).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.lab.side_by_side import (
    OneProcess,
    Replica,
    apart,
    from_rank_0,
    gradients,
    net,
    on_any_rank,
    parameters,
    side_by_side,
    statistics,
    unweighted,
)
from playground.runtime import device, report
from playground.runtime.agreement import check_agreed
from playground.training.batch_norm import convert
from playground.training.partition import share
from playground.training.settings import Settings, synchronised
from playground.training.sync import AverageAfterBackward


def run(rank: int, size: int, settings: Settings, steps: int) -> dict[str, Any]:
    """All four, in float64: for each {breaks: {what: largest difference}, holds: {what: largest difference}}."""
    check_agreed({"steps": steps})
    outcomes = {}
    for way in (summed, unweighted_shares, own_weights, batch_norm):
        outcomes[way.__name__] = way(rank, size, settings, steps)
        report(part=way.__name__, outcome=outcomes[way.__name__])
    return outcomes


def outcome(breaks: dict[str, float], holds: dict[str, float]) -> dict[str, dict[str, float]]:
    """Each figure, the largest on any rank."""
    figures = on_any_rank([*breaks.values(), *holds.values()])
    named = list(zip([*breaks, *holds], figures, strict=True))
    return {"breaks": dict(named[: len(breaks)]), "holds": dict(named[len(breaks) :])}


def summed(rank: int, size: int, settings: Settings, steps: int) -> dict[str, Any]:
    """Gradients are added up and not divided by the number of ranks: as if the learning rate were N times as large."""

    def add_up(model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)

    model = net(settings.seed)
    together = Replica(model, settings, AverageAfterBackward(add_up, model))
    alone = OneProcess(net(settings.seed), settings)
    faster = OneProcess(net(settings.seed), settings, lr=size * settings.lr)
    side_by_side(settings, steps, together, alone, faster)
    return outcome(
        {"parameters, from one process": apart(parameters(together), parameters(alone))},
        {"parameters, from one process with N times the --lr": apart(parameters(together), parameters(faster))},
    )


def unweighted_shares(rank: int, size: int, settings: Settings, steps: int) -> dict[str, Any]:
    """Shares are unequal (here the last rank has one sample) and each rank's mean loss counts as much as any other's:
    so it is with DistributedDataParallel too. The cure: each rank's sum of losses, over the size of the whole batch."""
    shares = [share(settings.batch_size - 1, each, size - 1) for each in range(size - 1)] + [1]
    alone, models = OneProcess(net(settings.seed), settings), [net(settings.seed), net(settings.seed)]
    wrong = Replica(models[0], settings, synchronised(models[0], settings), unweighted, shares)
    right = Replica(models[1], settings, synchronised(models[1], settings), shares=shares)
    side_by_side(settings, steps, alone, wrong, right)
    return outcome(
        {"parameters, from one process": apart(parameters(wrong), parameters(alone))},
        {"parameters, from one process, with sums over the whole batch": apart(parameters(right), parameters(alone))},
    )


def own_weights(rank: int, size: int, settings: Settings, steps: int) -> dict[str, Any]:
    """Each rank starts from weights of its own. The averaged gradients are the same on all ranks, so all take the same
    steps, and stay as far apart as they were."""
    model = net(settings.seed + rank)
    together, alone = Replica(model, settings, synchronised(model, settings)), OneProcess(net(settings.seed), settings)
    at_first = from_rank_0(parameters(together))
    side_by_side(settings, steps, together, alone)
    at_last = from_rank_0(parameters(together))
    return outcome(
        {
            "parameters, from one process": apart(parameters(together), parameters(alone)),
            "parameters, from rank 0 at first": apart(at_first),
            "parameters, from rank 0 at last": apart(at_last),
        },
        {
            "averaged gradients, from rank 0": apart(from_rank_0(gradients(together))),
            "change of the way from rank 0": apart(at_last, at_first),
        },
    )


def batch_norm(rank: int, size: int, settings: Settings, steps: int) -> dict[str, Any]:
    """BatchNorm normalises by the mean and variance of the samples it sees: a rank's share, not the batch. With
    statistics that are added up over all ranks (SyncBatchNorm) it is the batch again."""
    alone, models = OneProcess(normalising(settings.seed), settings), [normalising(settings.seed) for _ in range(2)]
    convert(models[1])
    local, synced = (Replica(model, settings, synchronised(model, settings)) for model in models)
    side_by_side(settings, steps, alone, local, synced)
    return outcome(
        {
            "parameters, from one process": apart(parameters(local), parameters(alone)),
            "running statistics, from one process": apart(statistics(local), statistics(alone)),
        },
        {
            "parameters, from one process, with SyncBatchNorm": apart(parameters(synced), parameters(alone)),
            "running statistics, from one process, with SyncBatchNorm": apart(statistics(synced), statistics(alone)),
        },
    )


def normalising(seed: int) -> nn.Module:
    """A small network with BatchNorm: images [batch, 1, 28, 28] → log-probabilities [batch, 10]."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(288, 10)]
    return nn.Sequential(*layers, nn.LogSoftmax(1)).to(device(), torch.float64)
