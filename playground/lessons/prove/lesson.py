"""Do N ranks with B/N samples each equal one process with B? The proof, and four ways to break it.

    python -m playground prove
    python -m playground prove -n 3 --batch-size 64
    python -m playground prove -n 8 --all-reduce ring

Each rank computes two things: its part of the work of N ranks, and, alone, the whole work of one process. Both start
from the same weights and see the same batches, without dropout; after every step their parameters are compared.
The proof comes first, then four ways in which N ranks are not one process, as they happen in practice. Each comes with
what must hold if its explanation is right: a difference that is rounding, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.lessons.prove.batch_norm import convert_sync_batchnorm
from playground.lessons.prove.page import Proof, ProveSettings
from playground.lessons.sgd.lesson import Net, share
from playground.measurement import Fields
from playground.measurement.interleave import slowest as max_over_ranks
from playground.runtime import device, report
from playground.training.data import Batch, Images
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.replicas import broadcast_parameters, flat
from playground.training.step import mean_loss_part, training_step
from playground.training.sync import GradSync, build_grad_sync, new_grad_sync


def experiment(rank: int, size: int, settings: ProveSettings) -> tuple[Proof, dict[str, Fields]]:
    """The proof and, where there is another rank to differ from, each way to break it. Every rank returns the same."""
    return run(rank, size, settings), break_it(rank, size, settings) if size > 1 else {}


def run(rank: int, size: int, settings: ProveSettings) -> Proof:
    """The proof in float64, which rounds least, and in float32, in which one trains. Every rank returns the same."""
    return {"float64": compare(settings, torch.float64), "float32": compare(settings, torch.float32)}


def compare(settings: ProveSettings, dtype: torch.dtype) -> Fields:
    """N ranks, with every gradient synchronisation, compared with one process on whole batches: the largest difference
    of any parameter, on any rank, after each step."""
    steps = []
    # cuDNN would round float32 to 10 bits (TF32) in some convolutions and not in others, as the batch's size suggests.
    with torch.backends.cudnn.flags(enabled=False):
        one_process, replicas = OneProcess(new_net(settings.seed, dtype), settings), new_replicas(settings, dtype)
        coming = global_batches(settings, dtype, f"comparing in {dtype}")
        for step, (images, labels) in enumerate(coming, 1):
            one_process.step(images, labels)
            found = [max_abs_diff(parameters(one_process.model))]
            for replica in replicas.values():
                replica.step(images, labels)
                found.append(differ(replica, one_process))
            largest, *differences = max_over_ranks(found)
            by_sync = dict(zip(replicas, differences, strict=True))
            steps.append({"step": step, "largest": largest, "differences": by_sync})
    return {"epsilon": torch.finfo(dtype).eps, "steps": steps}


def new_replicas(settings: ProveSettings, dtype: torch.dtype) -> dict[str, Replica]:
    """This rank's replica for every gradient synchronisation, and one in DistributedDataParallel. Each rank draws
    weights of its own; those of rank 0, which all then get, are the ones that the one process starts from. (Gradients
    are added up by `settings.all_reduce`; DistributedDataParallel's by the backend's own.)"""
    seed, replicas = settings.seed + dist.get_rank(), {}
    for name in GRAD_SYNCS:
        model = new_net(seed, dtype)
        broadcast_parameters(model)
        all_reduce = load_all_reduce(settings.all_reduce)
        sync = new_grad_sync(name, model, all_reduce=all_reduce, bucket_cap=settings.bucket_cap)
        replicas[name] = Replica(model, settings, sync)
    model = DistributedDataParallel(new_net(seed, dtype), bucket_cap_mb=settings.bucket_cap / 2**20)
    return {**replicas, "ddp": Replica(model, settings, GradSync(model))}


class OneProcess:
    """SGD on whole batches. Every rank can afford one, and needs no other rank for it."""

    def __init__(self, model: nn.Module, settings: ProveSettings, lr: float | None = None) -> None:
        self.model, self.sync = model, GradSync(model)  # which does nothing
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr or settings.lr, momentum=settings.momentum)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(self.model(images), labels)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """`images` and `labels` are the whole batch."""
        training_step(self.optimizer, [partial(self.loss, images, labels)], self.sync, last=True)  # it is compared next


class Replica(OneProcess):
    """This rank's model, trained on its share of every batch by `loss_of(output, labels, samples_per_rank)`; `sync`,
    or that of the settings, is to keep all replicas equal. `shares` says how many samples each rank gets; without it
    they are as equal as can be."""

    def __init__(
        self,
        model: nn.Module,
        settings: ProveSettings,
        sync: GradSync | None = None,
        *,
        loss_of: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = mean_loss_part,
        shares: Sequence[int] = (),
    ) -> None:
        super().__init__(model, settings)
        self.sync, self.loss_of = sync or build_grad_sync(model, settings), loss_of
        rank, size = dist.get_rank(), dist.get_world_size()
        shares = shares or [share(settings.batch_size, each, size) for each in range(size)]
        self.mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        self.samples_per_rank = settings.batch_size / size
        self.optimizer = self.sync.optimizer(partial(torch.optim.SGD, lr=settings.lr, momentum=settings.momentum))

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.model(images[self.mine]), labels[self.mine], self.samples_per_rank)


def new_net(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """`Net`, its weights drawn with `seed` (the same in every dtype), without dropout, whose masks would differ."""
    torch.manual_seed(seed)
    return Net().to(device(), dtype).eval()


def global_batches(
    settings: ProveSettings, dtype: torch.dtype = torch.float64, phase: str = "breaking it"
) -> Iterator[Batch]:
    """The whole batch of each step: samples in the order of the file, from its start again after its end. `phase`: text
    of the bar meanwhile."""
    data = Images(settings.folder, "train", settings.limit)
    for step in range(settings.steps):
        images, labels = data.span(step * settings.batch_size, settings.batch_size)
        yield images.to(device(), dtype), labels.to(device())
        report(phase=phase, step=step + 1, steps=settings.steps)


def break_it(rank: int, size: int, settings: ProveSettings) -> dict[str, Fields]:
    """All four ways to break it, in float64, by name. Every rank returns the same."""
    modes = (summed, unweighted_shares, own_weights, batch_norm)
    return {failure_mode.__name__: failure_mode(rank, size, settings) for failure_mode in modes}


def summed(rank: int, size: int, settings: ProveSettings) -> Fields:
    """Gradients are added up and not divided by the number of ranks: as if the learning rate were N times as large."""

    def add_gradients(model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)

    model = new_net(settings.seed)
    ranks = Replica(model, settings, GradSync(model, add_gradients))
    one_process = OneProcess(new_net(settings.seed), settings)
    faster = OneProcess(new_net(settings.seed), settings, lr=size * settings.lr)
    train_side_by_side(settings, ranks, one_process, faster)
    return break_result(
        breaks={"parameters, compared with one process": differ(ranks, one_process)},
        holds={"parameters, compared with one process at N times the --lr": differ(ranks, faster)},
    )


def unweighted_shares(rank: int, size: int, settings: ProveSettings) -> Fields:
    """Shares are unequal (here the last rank has one sample) and each rank's mean loss counts as much as any other's:
    so it is with DistributedDataParallel too. The cure: each rank's sum of losses, over the size of the whole batch."""

    def own_mean(output: torch.Tensor, labels: torch.Tensor, samples_per_rank: float) -> torch.Tensor:
        return F.nll_loss(output, labels)

    shares = [share(settings.batch_size - 1, each, size - 1) for each in range(size - 1)] + [1]
    one_process = OneProcess(new_net(settings.seed), settings)
    wrong = Replica(new_net(settings.seed), settings, loss_of=own_mean, shares=shares)
    right = Replica(new_net(settings.seed), settings, shares=shares)
    train_side_by_side(settings, one_process, wrong, right)
    of_sums = "parameters with sums over the whole batch, compared with one process"
    return break_result(
        breaks={"parameters, compared with one process": differ(wrong, one_process)},
        holds={of_sums: differ(right, one_process)},
    )


def own_weights(rank: int, size: int, settings: ProveSettings) -> Fields:
    """Each rank starts from weights of its own. The averaged gradients are the same on all ranks, so all take the same
    steps, and stay as far apart as they were."""
    model = new_net(settings.seed + rank)
    ranks = Replica(model, settings)
    one_process = OneProcess(new_net(settings.seed), settings)
    at_first = minus_rank_0(parameters(model))
    train_side_by_side(settings, ranks, one_process)
    at_last = minus_rank_0(parameters(model))
    return break_result(
        breaks={
            "parameters, compared with one process": differ(ranks, one_process),
            "initial parameters, compared with rank 0": max_abs_diff(at_first),
            "final parameters, compared with rank 0": max_abs_diff(at_last),
        },
        holds={
            "averaged gradients, compared with rank 0": max_abs_diff(minus_rank_0(gradients(model))),
            "change of the difference from rank 0 during training": max_abs_diff(at_last, at_first),
        },
    )


def batch_norm(rank: int, size: int, settings: ProveSettings) -> Fields:
    """BatchNorm normalises by the mean and variance of the samples it sees: a rank's share, not the batch. With
    statistics that are added up over all ranks (SyncBatchNorm) it is the batch again."""
    one_process = OneProcess(new_batch_norm_net(settings.seed), settings)
    local = Replica(new_batch_norm_net(settings.seed), settings)
    synced = Replica(convert_sync_batchnorm(new_batch_norm_net(settings.seed)), settings)
    train_side_by_side(settings, one_process, local, synced)
    return break_result(
        breaks={"parameters, compared with one process": differ(local, one_process)},
        holds={"parameters with SyncBatchNorm, compared with one process": differ(synced, one_process)},
    )


def new_batch_norm_net(seed: int) -> nn.Module:
    """A small network with BatchNorm: images [batch, 1, 28, 28] → log-probabilities [batch, 10]."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(288, 10)]
    return nn.Sequential(*layers, nn.LogSoftmax(1)).to(device(), torch.float64)


def train_side_by_side(settings: ProveSettings, *runs: OneProcess) -> None:
    for images, labels in global_batches(settings):
        for run in runs:
            run.step(images, labels)


def differ(ranks: Replica, one_process: OneProcess) -> float:
    """The largest difference of any parameter, on this rank."""
    return max_abs_diff(parameters(ranks.model), parameters(one_process.model))


def break_result(*, breaks: Mapping[str, float], holds: Mapping[str, float]) -> Fields:
    """The differences, by description, that are wrong, and those that must be rounding if the explanation of the
    failure mode is right: this rank's become the largest on any rank. All ranks must call this."""
    largest = iter(max_over_ranks([*breaks.values(), *holds.values()]))
    return {"breaks": {name: next(largest) for name in breaks}, "holds": {name: next(largest) for name in holds}}


def parameters(model: nn.Module) -> torch.Tensor:
    """All parameters, flattened into one vector, [elements]."""
    return flat(model.parameters())


def gradients(model: nn.Module) -> torch.Tensor:
    """The gradients of the last step, flattened into one vector, [elements]."""
    return flat(param.grad for param in model.parameters() if param.grad is not None)


def max_abs_diff(one: torch.Tensor, other: torch.Tensor | float = 0.0) -> float:
    """The largest difference between elements; infinite where one of them is not a finite number."""
    return (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def minus_rank_0(values: torch.Tensor) -> torch.Tensor:
    """`values` less those of rank 0. All ranks must call this."""
    root = values.clone()
    dist.broadcast(root, src=0)
    return values - root


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
