"""Training resumes after failures: ranks are killed, all restart, and the end has the same bits.

    python -m playground elastic
    python -m playground elastic --kills 10 --seed 7 --way ddp

The same training runs twice: once undisturbed, and once with ranks that are killed. Both take snapshots. When a rank is
gone, the others cannot continue: the launcher ends them, starts as many new ones, and these resume from the newest
snapshot. That is one file for all ranks, whole or absent, as torch.load(file, weights_only=True) reads it:

    {"step": 20, "fingerprint": {the settings of the run},
     "shared": {"model": …, "optimizer": …, "position": …},
     "own": [{"random_numbers": …, "history": …}, …]}

Shared is what is the same on all ranks; own has an entry for each: its random numbers, and its totals of the epoch.
How a snapshot is taken, and how a run is put back to where it was: playground/training/resumable.py.
What ranks run is what stands here; the experiment, in the process that launches them, is on the page beside it, since
that process does not need torch. sgd and ddp with --snapshots take the same steps by the general loop,
playground/training/loop.py.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html, for the idea that all ranks restart
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.elastic.page import Kill
from playground.lessons.sgd.lesson import Net, average_gradients
from playground.runtime import device, report, restart_count, synchronize
from playground.training.data import Images, batches, partition_dataset, partition_test_set
from playground.training.history import History
from playground.training.loop import first_sample, identify
from playground.training.replicas import broadcast_parameters
from playground.training.results import TrainingResult
from playground.training.resumable import ResumableRun
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync


def run(rank: int, size: int, settings: TrainingSettings, way: str, kills: Sequence[Kill]) -> TrainingResult:
    """Train `Net` as the lesson `way`, sgd or ddp, from the newest snapshot on. Every rank returns the same figures.

    Each time the world is started, the next of `kills` happens.
    """
    torch.manual_seed(settings.seed)
    images = Images(settings.folder, "train", settings.limit)
    train_set, _ = partition_dataset(images, settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = Net().to(device(), memory_format=torch.channels_last)
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    history = History(model, train_set, test_set)
    torch.manual_seed(settings.seed + 1 + rank)  # from here on, each rank draws different dropout masks

    def warm_up() -> None:  # DDP rebuilds its buckets after its first backward: before it resumes, not later
        images, _ = first_sample(train_set)
        model(images).sum().backward()

    sync = GradSync(model)
    resumable = ResumableRun(settings.snapshots, partial(identify, settings, sync), sync, optimizer, history, warm_up)
    position = resumable.position
    train_set.sampler.go_on_from(position.epoch - 1, position.step)

    for epoch in history.epochs(settings.epochs):
        done = resumable.enter(epoch)
        coming = batches(train_set, settings.batch_size, done)
        for step, (images, labels, samples_per_rank) in enumerate(coming, done + 1):
            resumable.draw_as_before()  # now that the loader has drawn its own random numbers
            optimizer.zero_grad()
            output = model(images)
            loss = F.nll_loss(output, labels, reduction="sum")
            (loss / samples_per_rank).backward()
            if way == "sgd":
                average_gradients(model)
            optimizer.step()
            history.add(loss, output, labels)
            die_if_due(rank, resumable.position.total + 1, kills)
            resumable.advance(step, last=step == len(train_set))  # takes a snapshot if one is due

    resumable.end()
    return history.result()


def die_if_due(rank: int, step: int, kills: Sequence[Kill]) -> None:
    """Be killed after this step, if that is what is to happen. Nothing warns the rank, and nothing is tidied up."""
    synchronize()  # on a GPU a step is issued long before it is done
    report(stepped=step)
    if (rank, step) in kills[restart_count() : restart_count() + 1]:
        report(killed=step)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
