"""Four ways in which N ranks are not one process, as they happen in practice, each with its number.

    python -m playground prove

Each comes with what must hold if its explanation is right (a difference that is rounding, and no more).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.lessons.prove.differences import (
    gradients,
    max_abs_diff,
    max_over_ranks,
    minus_rank_0,
    parameters,
    running_stats,
)
from playground.lessons.prove.lesson import OneProcess, Replica, global_batches, new_net
from playground.lessons.prove.results import BreakResult
from playground.lessons.prove.settings import ProveSettings
from playground.runtime import device, report
from playground.training.batch_norm import convert_sync_batchnorm
from playground.training.partition import share
from playground.training.sync import AverageAfterBackward, build_grad_sync


def run(rank: int, size: int, settings: ProveSettings) -> dict[str, BreakResult]:
    """All four, in float64, by name. Every rank returns the same."""
    results = {}
    for failure_mode in (summed, unweighted_shares, own_weights, batch_norm):
        name = failure_mode.__name__
        results[name] = failure_mode(rank, size, settings)
        report(part=name, outcome=results[name])
    return results


def summed(rank: int, size: int, settings: ProveSettings) -> BreakResult:
    """Gradients are added up and not divided by the number of ranks: as if the learning rate were N times as large."""

    def add_gradients(model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)

    model = new_net(settings.seed)
    ranks = Replica(model, settings, AverageAfterBackward(add_gradients, model))
    one_process = OneProcess(new_net(settings.seed), settings)
    faster = OneProcess(new_net(settings.seed), settings, lr=size * settings.lr)
    train_side_by_side(settings, ranks, one_process, faster)
    return break_result(
        breaks={"parameters, compared with one process": parameter_difference(ranks, one_process)},
        holds={"parameters, compared with one process at N times the --lr": parameter_difference(ranks, faster)},
    )


def unweighted_shares(rank: int, size: int, settings: ProveSettings) -> BreakResult:
    """Shares are unequal (here the last rank has one sample) and each rank's mean loss counts as much as any other's:
    so it is with DistributedDataParallel too. The cure: each rank's sum of losses, over the size of the whole batch."""

    def own_mean(output: torch.Tensor, labels: torch.Tensor, samples_per_rank: float) -> torch.Tensor:
        return F.nll_loss(output, labels)

    shares = [share(settings.batch_size - 1, each, size - 1) for each in range(size - 1)] + [1]
    models = [new_net(settings.seed), new_net(settings.seed)]
    one_process = OneProcess(new_net(settings.seed), settings)
    wrong = Replica(models[0], settings, build_grad_sync(models[0], settings), loss=own_mean, shares=shares)
    right = Replica(models[1], settings, build_grad_sync(models[1], settings), shares=shares)
    train_side_by_side(settings, one_process, wrong, right)
    return break_result(
        breaks={"parameters, compared with one process": parameter_difference(wrong, one_process)},
        holds={
            "parameters with sums over the whole batch, compared with one process": parameter_difference(
                right, one_process
            )
        },
    )


def own_weights(rank: int, size: int, settings: ProveSettings) -> BreakResult:
    """Each rank starts from weights of its own. The averaged gradients are the same on all ranks, so all take the same
    steps, and stay as far apart as they were."""
    model = new_net(settings.seed + rank)
    ranks = Replica(model, settings, build_grad_sync(model, settings))
    one_process = OneProcess(new_net(settings.seed), settings)
    at_first = minus_rank_0(parameters(model))
    train_side_by_side(settings, ranks, one_process)
    at_last = minus_rank_0(parameters(model))
    return break_result(
        breaks={
            "parameters, compared with one process": parameter_difference(ranks, one_process),
            "initial parameters, compared with rank 0": max_abs_diff(at_first),
            "final parameters, compared with rank 0": max_abs_diff(at_last),
        },
        holds={
            "averaged gradients, compared with rank 0": max_abs_diff(minus_rank_0(gradients(model))),
            "change of the difference from rank 0 during training": max_abs_diff(at_last, at_first),
        },
    )


def batch_norm(rank: int, size: int, settings: ProveSettings) -> BreakResult:
    """BatchNorm normalises by the mean and variance of the samples it sees: a rank's share, not the batch. With
    statistics that are added up over all ranks (SyncBatchNorm) it is the batch again."""
    models = [new_batch_norm_net(settings.seed), convert_sync_batchnorm(new_batch_norm_net(settings.seed))]
    one_process = OneProcess(new_batch_norm_net(settings.seed), settings)
    local, synced = (Replica(model, settings, build_grad_sync(model, settings)) for model in models)
    train_side_by_side(settings, one_process, local, synced)
    return break_result(
        breaks={
            "parameters, compared with one process": parameter_difference(local, one_process),
            "running statistics, compared with one process": running_stats_difference(local, one_process),
        },
        holds={
            "parameters with SyncBatchNorm, compared with one process": parameter_difference(synced, one_process),
            "running statistics with SyncBatchNorm, compared with one process": running_stats_difference(
                synced, one_process
            ),
        },
    )


def new_batch_norm_net(seed: int) -> nn.Module:
    """A small network with BatchNorm: images [batch, 1, 28, 28] → log-probabilities [batch, 10]."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(288, 10)]
    return nn.Sequential(*layers, nn.LogSoftmax(1)).to(device(), torch.float64)


def train_side_by_side(settings: ProveSettings, *runs: OneProcess | Replica) -> None:
    """Let all of them take the same steps."""
    for images, labels in global_batches(settings):
        for run in runs:
            run.step(images, labels)


def parameter_difference(ranks: Replica, one_process: OneProcess) -> float:
    return max_abs_diff(parameters(ranks.model), parameters(one_process.model))


def running_stats_difference(ranks: Replica, one_process: OneProcess) -> float:
    return max_abs_diff(running_stats(ranks.model), running_stats(one_process.model))


def break_result(*, breaks: Mapping[str, float], holds: Mapping[str, float]) -> BreakResult:
    """This rank's differences become the largest on any rank. All ranks must call this."""
    largest = max_over_ranks([*breaks.values(), *holds.values()])
    return BreakResult(
        breaks=dict(zip(breaks, largest[: len(breaks)], strict=True)),
        holds=dict(zip(holds, largest[len(breaks) :], strict=True)),
    )
