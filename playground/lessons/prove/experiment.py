"""What the command compares: N ranks with every gradient synchronisation, and what explains each
way to break it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.lessons.prove import lesson as board
from playground.lessons.prove.batch_norm import convert_sync_batchnorm
from playground.lessons.prove.lesson import (
    Training,
    max_abs_diff,
    new_net,
    parameters,
    part_of_loss,
)
from playground.lessons.prove.page import Break, ComparedStep, Comparison, Proof, ProveSettings
from playground.measurement.interleave import slowest as max_over_ranks
from playground.runtime import device, on_device, report
from playground.training.data import Batch, Images
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.replicas import broadcast_parameters, flatten
from playground.training.step import training_step
from playground.training.sync import GradSync, build_grad_sync, new_grad_sync


def experiment(rank: int, size: int, settings: ProveSettings) -> tuple[Proof, dict[str, Break]]:
    """The proof and, where there is another rank to differ from, each way to break it. Every rank
    returns the same."""
    return run(rank, size, settings), break_it(rank, size, settings) if size > 1 else {}


def run(rank: int, size: int, settings: ProveSettings) -> Proof:
    """The proof in float64, which rounds least, and in float32, in which one trains. Every rank
    returns the same."""
    return {
        "float64": compare(settings, torch.float64),
        "float32": compare(settings, torch.float32),
    }


def compare(settings: ProveSettings, dtype: torch.dtype) -> Comparison:
    """The board's comparison, with a replica for every gradient synchronisation."""
    steps = list[ComparedStep]()
    # cuDNN would round float32 to 10 bits (TF32) in some convolutions and not in others, as the
    # batch's size suggests.
    with on_device(), torch.backends.cudnn.flags(enabled=False):
        one_process = new_one_process(new_net(settings.seed, dtype), settings)
        replicas = new_replicas(settings, dtype)
        batches = global_batches(settings, dtype, f"comparing in {dtype}")
        compared = board.compare(batches, one_process, *replicas.values())
        for step, (largest, *differences) in enumerate(compared, 1):
            by_sync = dict(zip(replicas, differences, strict=True))
            steps.append(ComparedStep(step, largest, by_sync))
    return Comparison(torch.finfo(dtype).eps, steps)


def new_replicas(settings: ProveSettings, dtype: torch.dtype) -> dict[str, Training]:
    """This rank's replica for every gradient synchronisation, and one in DistributedDataParallel.
    Each rank draws weights of its own; those of rank 0, which all then get, are the ones that the
    one process starts from. (Gradients are added up by `settings.all_reduce`;
    DistributedDataParallel's by the backend's own.)"""
    seed = settings.seed + dist.get_rank()
    replicas = dict[str, Training]()
    for name in GRAD_SYNCS:
        model = new_net(seed, dtype)
        broadcast_parameters(model)
        all_reduce = load_all_reduce(settings.all_reduce)
        sync = new_grad_sync(name, model, all_reduce=all_reduce, bucket_cap=settings.bucket_cap)
        replicas[name] = Replica(model, settings, sync)
    model = DistributedDataParallel(new_net(seed, dtype), bucket_cap_mb=settings.bucket_cap / 2**20)
    return {**replicas, "ddp": Replica(model, settings, GradSync(model))}


def new_one_process(model: nn.Module, settings: ProveSettings, times: int = 1) -> Training:
    """SGD on whole batches, at so many times the learning rate."""
    return Training(model, lr=times * settings.lr, momentum=settings.momentum)


class Replica(Training):
    """This rank's model, trained on its share of every batch; `sync`, or that of the settings, is
    to keep all replicas equal."""

    def __init__(
        self,
        model: nn.Module,
        settings: ProveSettings,
        sync: GradSync | None = None,
        loss: Any = part_of_loss,
    ) -> None:
        super().__init__(model, loss)
        self.sync = sync or build_grad_sync(model, settings)
        self.optimizer = self.sync.optimizer(
            partial(torch.optim.SGD, lr=settings.lr, momentum=settings.momentum)
        )

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = partial(self.loss, self.model, images, labels)
        training_step(self.optimizer, [loss], self.sync, last=True)  # it is compared next


def global_batches(
    settings: ProveSettings, dtype: torch.dtype = torch.float64, phase: str = "breaking it"
) -> Iterator[Batch]:
    """The whole batch of each step: samples in the order of the file, from its start again after
    its end. `phase`: text of the bar meanwhile."""
    data = Images(settings.folder, "train", settings.limit)
    for step in range(settings.steps):
        images, labels = data.span(step * settings.batch_size, settings.batch_size)
        yield images.to(device(), dtype), labels.to(device())
        report(phase=phase, step=step + 1, steps=settings.steps)


def break_it(rank: int, size: int, settings: ProveSettings) -> dict[str, Break]:
    """All four ways to break it, in float64, by name. Every rank returns the same."""
    modes = (summed, unweighted_shares, own_weights, batch_norm)
    with on_device():
        return {failure_mode.__name__: failure_mode(size, settings) for failure_mode in modes}


PARAMETERS = "parameters, compared with one process"


def summed(size: int, settings: ProveSettings) -> Break:
    broken = board.summed(settings.seed)
    ranks = Replica(broken.model, settings, GradSync(broken.model, broken.average))
    one_process = new_one_process(new_net(settings.seed), settings)
    faster = new_one_process(new_net(settings.seed), settings, times=size)
    train_side_by_side(settings, ranks, one_process, faster)
    return break_result(
        breaks={PARAMETERS: differ(ranks, one_process)},
        holds={"parameters, compared with one process at N times the --lr": differ(ranks, faster)},
    )


def unweighted_shares(size: int, settings: ProveSettings) -> Break:
    broken = board.unweighted_shares(settings.seed)
    weighted = partial(part_of_loss, shares_of=board.one_for_the_last)
    one_process = new_one_process(new_net(settings.seed), settings)
    wrong = Replica(broken.model, settings, loss=broken.loss)
    right = Replica(new_net(settings.seed), settings, loss=weighted)
    train_side_by_side(settings, one_process, wrong, right)
    of_sums = "parameters with sums over the whole batch, compared with one process"
    return break_result(
        breaks={PARAMETERS: differ(wrong, one_process)},
        holds={of_sums: differ(right, one_process)},
    )


def own_weights(size: int, settings: ProveSettings) -> Break:
    model = board.own_weights(settings.seed).model
    ranks = Replica(model, settings)
    one_process = new_one_process(new_net(settings.seed), settings)
    at_first = minus_rank_0(parameters(model))
    train_side_by_side(settings, ranks, one_process)
    at_last = minus_rank_0(parameters(model))
    gradients = flatten(param.grad for param in model.parameters())
    return break_result(
        breaks={
            PARAMETERS: differ(ranks, one_process),
            "initial parameters, compared with rank 0": max_abs_diff(at_first),
            "final parameters, compared with rank 0": max_abs_diff(at_last),
        },
        holds={
            "averaged gradients, compared with rank 0": max_abs_diff(minus_rank_0(gradients)),
            "change of the difference from rank 0 during training": max_abs_diff(at_last, at_first),
        },
    )


def batch_norm(size: int, settings: ProveSettings) -> Break:
    one_process = new_one_process(board.new_batch_norm_net(settings.seed), settings)
    local = Replica(board.batch_norm(settings.seed).model, settings)
    synced = Replica(convert_sync_batchnorm(board.new_batch_norm_net(settings.seed)), settings)
    train_side_by_side(settings, one_process, local, synced)
    return break_result(
        breaks={PARAMETERS: differ(local, one_process)},
        holds={
            "parameters with SyncBatchNorm, compared with one process": differ(synced, one_process)
        },
    )


def train_side_by_side(settings: ProveSettings, *trainings: Training) -> None:
    for images, labels in global_batches(settings):
        for training in trainings:
            training.step(images, labels)


def differ(ranks: Training, one_process: Training) -> float:
    """The largest difference of any parameter, on this rank."""
    return max_abs_diff(parameters(ranks.model), parameters(one_process.model))


def break_result(*, breaks: Mapping[str, float], holds: Mapping[str, float]) -> Break:
    """This rank's differences become the largest on any rank. All ranks must call this."""
    largest = iter(max_over_ranks([*breaks.values(), *holds.values()]))
    return Break(
        breaks={name: next(largest) for name in breaks},
        holds={name: next(largest) for name in holds},
    )


def minus_rank_0(values: torch.Tensor) -> torch.Tensor:
    """`values` less those of rank 0. All ranks must call this."""
    root = values.clone()
    dist.broadcast(root, src=0)
    return values - root
