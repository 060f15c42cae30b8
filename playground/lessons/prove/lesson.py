"""Do N ranks with B/N samples each equal one process with B? The proof, and four ways to break it.

    python -m playground prove
    python -m playground prove -n 3 --batch-size 64
    python -m playground prove -n 8 --all-reduce ring --bucket-cap-mb 0.001

Each rank computes two things: its part of the work of N ranks, and, alone, the whole work of one process. Both start
from the same weights and see the same batches, without dropout; after every step gradients and parameters are compared.
The ways to break it: failure_modes.py, beside this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import load_all_reduce
from playground.lessons.prove.differences import largest_of_all_ranks, max_abs, max_abs_difference
from playground.lessons.prove.results import ComparedStep, Comparison, MaxAbs, Proof
from playground.lessons.prove.settings import ProveSettings
from playground.runtime import device, report
from playground.training.data import Batch, Images
from playground.training.grad_syncs import grad_syncs_for
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import broadcast_parameters
from playground.training.step import mean_loss_part, training_step
from playground.training.sync import GradSync, new_grad_sync

Loss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Called as `loss(output, labels, samples_per_rank)`, as `mean_loss_part` is."""


def run(rank: int, size: int, settings: ProveSettings) -> Proof:
    """The proof in float64, which rounds least, and in float32, in which one trains. Every rank returns the same."""
    proof = Proof(float64=compare(settings, torch.float64), float32=compare(settings, torch.float32))
    report(part="equal", outcome=proof)
    return proof


def compare(settings: ProveSettings, dtype: torch.dtype) -> Comparison:
    """N ranks, with every gradient synchronisation, compared with one process on whole batches: the largest difference
    of any gradient, and of any parameter, on any rank, after each step."""
    steps = []
    # cuDNN would round float32 to 10 bits (TF32) in some convolutions and not in others, as the batch's size suggests.
    with torch.backends.cudnn.flags(enabled=False):
        one_process, replicas = OneProcess(new_net(settings.seed, dtype), settings), new_replicas(settings, dtype)
        coming = global_batches(settings, dtype, f"comparing in {dtype}")
        for step, (images, labels) in enumerate(coming, 1):
            one_process.step(images, labels)
            found = [max_abs(one_process.model)]
            for replica in replicas.values():
                replica.step(images, labels)
                found.append(replica.difference_from(one_process))
            largest, *differences = largest_of_all_ranks(found)
            by_sync = dict(zip(replicas, differences, strict=True))
            steps.append(ComparedStep(step=step, largest=largest, differences=by_sync))
    return Comparison(epsilon=torch.finfo(dtype).eps, steps=steps)


def new_replicas(settings: ProveSettings, dtype: torch.dtype) -> dict[str, Replica]:
    """This rank's replica for every gradient synchronisation, and one in DistributedDataParallel.

    Each rank draws weights of its own; those of rank 0, which all then get, are the ones that the one process starts
    from. (Gradients are added up by `settings.all_reduce`; DistributedDataParallel's by the backend's own.)
    """
    seed, replicas = settings.seed + dist.get_rank(), {}
    for name, spec in grad_syncs_for(has_embeddings=False).items():
        model = new_net(seed, dtype)
        broadcast_parameters(model)
        sync = new_grad_sync(name, model, load_all_reduce(settings.all_reduce), settings.bucket_cap)
        replicas[name] = Replica(model, settings, sync, averages_gradients=spec.rung)
    model = DistributedDataParallel(new_net(seed, dtype), bucket_cap_mb=settings.bucket_cap / 2**20)
    return {**replicas, "ddp": Replica(model, settings, GradSync(model))}


class OneProcess:
    """SGD on whole batches. Every rank can afford one, and needs no other rank for it."""

    def __init__(self, model: nn.Module, settings: ProveSettings, lr: float | None = None) -> None:
        self.model, self.sync = model, GradSync(model)  # which does nothing
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr or settings.lr, momentum=settings.momentum)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        training_step(self.optimizer, [lambda: F.nll_loss(self.model(images), labels)], self.sync)


class Replica:
    """This rank's model, trained on its share of every batch; `sync` is to keep all replicas equal.

    `shares` says how many samples each rank gets; without it they are as equal as can be. With `averages_gradients`
    all replicas have the same gradients after a step; without, as in local SGD, each has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ProveSettings,
        sync: GradSync,
        *,
        loss: Loss = mean_loss_part,
        shares: Sequence[int] = (),
        averages_gradients: bool = True,
    ) -> None:
        self.model, self.sync, self.loss, self.averages_gradients = model, sync, loss, averages_gradients
        rank, size = dist.get_rank(), dist.get_world_size()
        shares = shares or [share(settings.batch_size, each, size) for each in range(size)]
        self.mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        self.samples_per_rank = settings.batch_size / size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """`images` and `labels` are the whole batch, of which this rank takes its share."""

        def loss() -> torch.Tensor:
            return self.loss(self.model(images[self.mine]), labels[self.mine], self.samples_per_rank)

        training_step(self.optimizer, [loss], self.sync)

    def difference_from(self, one_process: OneProcess) -> MaxAbs:
        """The largest difference of any gradient, if they were averaged, and of any parameter, on this rank."""
        difference = max_abs_difference(self.model, one_process.model)
        return difference if self.averages_gradients else replace(difference, gradients=None)


def new_net(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """`Net`, its weights drawn with `seed` (the same in every dtype), without dropout, whose masks would differ."""
    torch.manual_seed(seed)
    return Net().to(device(), dtype).eval()


def global_batches(
    settings: ProveSettings, dtype: torch.dtype = torch.float64, phase: str = "breaking it"
) -> Iterator[Batch]:
    """The whole batch of each step: samples in the order of the file, from its start again after its end.

    `phase` is what a bar says meanwhile.
    """
    data = Images(settings.folder, "train", settings.limit)
    for step in range(settings.steps):
        images, labels = data.span(step * settings.batch_size, settings.batch_size)
        yield images.to(device(), dtype), labels.to(device())
        report(phase=phase, step=step + 1, steps=settings.steps)


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("prove")
