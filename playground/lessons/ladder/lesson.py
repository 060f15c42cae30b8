"""From `average_gradients` to DistributedDataParallel, rung by rung, each measured.

    python -m playground ladder
    python -m playground ladder --model resnet18 --plot ladder.svg
    python -m playground ladder --model bert
    python -m playground ladder -n 4 --bucket-cap-mb 0.02 --all-reduce ring

All train the same model on the same batches with the same dropout masks. In every round each takes one step, in an
order that changes, so that whatever else the machine does meets all of them. In the same rounds each also averages
gradients without a backward to hide behind, which shows how much of that it hides in its steps.
`--bucket-cap-mb` holds for the rungs and for DistributedDataParallel. `--all-reduce` is for the rungs:
DistributedDataParallel has the backend's.
The rungs: playground/training/gradients.py, hierarchical.py, overlap.py and, for models with embeddings,
sparse_embeddings.py. What is measured, and how: timed_replica.py, beside this.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from playground.algorithms import load_all_reduce
from playground.lessons.ladder.messages import count_messages
from playground.lessons.ladder.results import LadderResult
from playground.lessons.ladder.settings import LadderSettings, candidates
from playground.lessons.ladder.summary import parts_by_rank, summarize, time_in_turn
from playground.lessons.ladder.timed_replica import TimedReplica
from playground.measurement import environment
from playground.measurement.interleave import Heartbeat
from playground.runtime import device, host
from playground.runtime.agreement import require_same_on_all_ranks
from playground.training.data import Images, batches, partition_dataset
from playground.training.models import MODELS
from playground.training.replicas import broadcast_parameters
from playground.training.zipf import ZipfSequences

WARM_UP = 3
"""Rounds that are trained but not timed: DistributedDataParallel arranges its buckets anew after the first."""


def run(rank: int, size: int, settings: LadderSettings) -> LadderResult:
    """Train the model on every rung, and in DistributedDataParallel, with a clock on each. All ranks return the same.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    torch.manual_seed(settings.seed)
    start = MODELS[settings.model].code().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(start)
    rounds = Rounds(settings)
    coming = iter(rounds)
    next(coming)
    all_reduce, messages, replicas = load_all_reduce(settings.all_reduce), [], []
    new_sgd = partial(torch.optim.SGD, lr=settings.lr, momentum=settings.momentum)
    for name in candidates(settings.model):
        rounds.heartbeat.beat()
        messages.append(count_messages(name, start, all_reduce, settings.bucket_cap, rounds.inputs))
        replicas.append(TimedReplica(name, start, all_reduce, settings.bucket_cap, new_sgd))

    for replica in replicas:
        rounds.step(replica)  # in the first round only this: DistributedDataParallel has no buckets before a backward
    seconds = time_in_turn(replicas, rounds.step, coming, settings.seed, WARM_UP - 1)
    return LadderResult(
        rungs=summarize(replicas, messages, seconds), parts=parts_by_rank(replicas, seconds),
        environment=environment.describe(),
    )  # fmt: skip


class Rounds:
    """In each, all replicas step on the same batch with the same dropout masks; after the last sample comes the first.

    All batches are whole, so that all steps are alike.
    """

    def __init__(self, settings: LadderSettings) -> None:
        self.settings, self.heartbeat = settings, Heartbeat()
        samples = len(training_set(settings, settings.limit)) // settings.batch_size * settings.batch_size
        self.train_set = partition_dataset(training_set(settings, samples), settings.batch_size, settings.seed)

    def __iter__(self) -> Iterator[None]:
        total = WARM_UP + self.settings.steps
        for number, (inputs, labels, samples_per_rank) in zip(range(total), self.batches(), strict=False):
            self.number, self.inputs, self.labels, self.samples_per_rank = number, (inputs,), labels, samples_per_rank
            self.heartbeat.beat(phase="measuring all rungs side by side", step=number, steps=total)
            yield

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        while True:
            yield from batches(self.train_set, self.settings.batch_size)

    def step(self, replica: TimedReplica) -> list[float]:
        """Let the replica take this round's step. Seconds of each of its parts."""
        torch.manual_seed(self.settings.seed + 1 + self.number * dist.get_world_size() + dist.get_rank())
        return replica.step(self.inputs, self.labels, self.samples_per_rank)


def training_set(settings: LadderSettings, limit: int | None) -> Images | ZipfSequences:
    """What the model is trained on: images, or sequences of token ids. `limit` keeps the first."""
    return ZipfSequences(limit) if MODELS[settings.model].reads_tokens else Images(settings.folder, "train", limit)


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("ladder")
