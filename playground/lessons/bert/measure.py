"""The cost of each way: time, utilisation, memory, the largest batch, and what averaging gradients can hide behind."""

from __future__ import annotations

import functools
from dataclasses import fields
from functools import partial
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.bert.lesson import batches, build_model, prepare
from playground.lessons.bert.settings import DDP, Averaging, BertSettings, Held, LargestBatch, PartReady, Speed, Use
from playground.lessons.data_parallel.experiment import track_step
from playground.lessons.data_parallel.machine import HOST
from playground.lessons.data_parallel.memory import (
    Account,
    label_buckets,
    largest_batch,
    track_memory,
    track_utilisation,
)
from playground.lessons.ladder.lesson import new_rung
from playground.lessons.ladder.measure import Clock, TimedReplica, count_messages, summarize, time_in_turn
from playground.lessons.ladder.page import AveragingCost
from playground.measurement.interleave import Heartbeat, interleave, slowest, timed
from playground.runtime import device
from playground.training.bert import Model
from playground.training.sentence_pairs.pairs import PairBatch, Pairs
from playground.training.step import training_step
from playground.training.sync import GradSync


class Step:
    """Called, it takes a step on this rank's part of the next batch."""

    def __init__(self, rank: int, size: int, settings: BertSettings) -> None:
        self.model, self.loss, self.optimizer = prepare(settings)
        self.coming = batches(settings, rank, size)

    def __call__(self) -> None:
        self.take(next(self.coming))

    def take(self, batch: PairBatch) -> None:
        """A step on that batch."""
        training_step(self.optimizer, [partial(self.loss, batch)], GradSync(self.model))


def devices_of(settings: BertSettings) -> list[torch.device]:
    """The devices of this process, numbered, as accounts of memory want them."""
    if settings.way == DDP:
        return [torch.device(device().type, device().index or 0)]
    return [torch.device(name) for name in settings.devices]


WARM_UP, STEPS = 3, 10
"""Steps, or rounds of them, that are not counted, and those that are."""
WORDS = "word embeddings"


def ready(rank: int, size: int, settings: BertSettings) -> list[PartReady]:
    """When backward has the gradients of each part of the model. It goes from the last layer to the first, so the
    embeddings come last: when their average can start, there is no backward left to hide it behind."""
    model, clock, coming = build_model(Model, settings), Clock(), batches(settings, rank, size)
    parts: dict[str, int] = {}
    for name, param in model.named_parameters():
        part = part_of(name)
        parts[part] = parts.get(part, 0) + param.nbytes
        param.register_post_accumulate_grad_hook(lambda param, part=part: clock.take(part))
    shares: dict[str, list[float]] = {part: [] for part in parts}
    heartbeat = Heartbeat()
    for number in range(WARM_UP + STEPS):
        heartbeat.beat()
        batch = next(coming)
        loss = F.cross_entropy(model(*batch.inputs), batch.labels)
        clock.start()
        loss.backward()
        clock.take("end")
        [whole] = clock.seconds("start", "end")
        for part in parts if number >= WARM_UP else ():
            shares[part].append(clock.seconds("start", part)[0] / whole)
    words = count_words(batch.input_ids, settings.config.vocabulary)
    found = [
        PartReady(part=part, bytes=nbytes, ready=median(shares[part]), rows_used=words if part == WORDS else None)
        for part, nbytes in parts.items()
    ]
    return sorted(found, key=lambda part: part.ready)


def part_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to."""
    words = parameter.removeprefix("bert.").split(".")
    if words[0] == "embeddings":
        return WORDS if words[1] == "word_embeddings" else "other embeddings"
    return f"layer {words[2]}" if words[0] == "encoder" else words[0]


def count_words(input_ids: torch.Tensor, vocabulary: int) -> int:
    """How many rows of the word embeddings the batches of all ranks use."""
    used = torch.zeros(vocabulary, dtype=torch.int64, device=device())
    used[input_ids.unique()] = 1
    dist.all_reduce(used)
    return int((used > 0).sum())


def averaging(rank: int, size: int, settings: BertSettings) -> list[Averaging]:
    """The cost of averaging the gradients in a step: with DDP, and with a rung that sends of the word embeddings'
    gradient only the rows that a step has used. Both take the same steps with Adam, in turn."""
    torch.set_num_threads(settings.threads)
    start, coming = build_model(Model, settings), batches(settings, rank, size)
    new_adam = partial(torch.optim.Adam, lr=settings.lr, fused=True)
    batch = next(coming)
    messages, replicas = [], []

    def take_step(replica: TimedReplica) -> list[float]:
        return replica.step(batch.inputs, batch.labels, settings.batch_size / size)

    for name in ("sparse-embeddings", "ddp"):
        new_sync = partial(new_rung, name, bucket_cap=settings.bucket_cap)
        messages.append(count_messages(new_sync, start, dist.all_reduce, batch.inputs))
        replicas.append(TimedReplica(name, start, new_sync, dist.all_reduce, new_adam, mean_loss))
        take_step(replicas[-1])
    seconds = time_in_turn(replicas, take_step, range(WARM_UP + STEPS), settings.seed, WARM_UP)
    cost = [field.name for field in fields(AveragingCost)]
    return [
        Averaging(way=rung.rung, seconds=rung.p50, **{name: getattr(rung, name) for name in cost})
        for rung in summarize(replicas, messages, seconds)
    ]


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, samples_per_rank: float) -> torch.Tensor:
    """This rank's part of the mean loss over the global batch."""
    return F.cross_entropy(logits, labels, reduction="sum") / samples_per_rank


LOOKED_ON = 3
"""Steps in which operations are timed."""


def speed(rank: int, size: int, settings: BertSettings) -> Speed:
    """Samples per second, where more workers share the same batches. One worker is one device, which waits for none.

    A step's time is that of the slowest rank, from fetching the batch to the optimizer's end; the median of several.
    """
    per_step = median(slowest(time_steps(Step(rank, size, settings))))
    rate = settings.batch_size / per_step
    return Speed(way=settings.way, workers=settings.workers, seconds=per_step, samples_per_second=rate)


def time_steps(step: Step) -> list[float]:
    """Seconds of some steps on this rank, after the first few."""
    [seconds] = interleave([timed(step)], range(WARM_UP + STEPS), Random(0))
    return seconds[WARM_UP:]


def utilisation(rank: int, size: int, settings: BertSettings) -> list[Use]:
    """The share of a step in which each device computes. The rest of it the device waits: for the first one, which
    collects and updates; for copies and messages; for Python."""
    step, devices = Step(rank, size, settings), devices_of(settings)
    seconds = median(time_steps(step))
    with track_utilisation(devices) as use:
        for _ in range(LOOKED_ON):
            step()
    shares = use.share_of(LOOKED_ON * seconds)
    return [Use(device=str(each), computing=shares[each]) for each in devices]


def memory(rank: int, size: int, settings: BertSettings) -> list[Held]:
    """Each device's memory at its peak. DataParallel's first device alone has all of the gradients and Adam's state;
    with DDP every device has them, and none more than the others."""
    probe = Probe(rank, size, settings)
    account = probe.account_of(settings.batch_size // size)
    return [Held(device=str(each), peak=account.peak[each], held=account.at_peak[each]) for each in probe.devices]


def largest(rank: int, size: int, settings: BertSettings) -> LargestBatch:
    """The largest batch such that no device holds more than the cap, found by steps that are really taken.

    Raises `UsageError` if one sample per worker is too many.
    """
    probe, per_rank = Probe(rank, size, settings), settings.workers // size
    account_of = functools.cache(probe.account_of)
    held = account_of(per_rank).held_by_label[probe.devices[0]]

    def peak(samples: int) -> int:
        """Peak of the fullest device of any rank, with that number of samples on every worker."""
        fullest = torch.tensor(max(account_of(per_rank * samples).peak.values()), device=device())
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        return int(fullest)

    samples = largest_batch(peak, settings.memory_cap, model=held, limit=len(probe.data) // settings.workers)
    account = account_of(per_rank * samples)
    fullest = max(probe.devices, key=account.peak.__getitem__)
    workers, counts = settings.workers, {"batch_size": samples * settings.workers, "peak": account.peak[fullest]}
    return LargestBatch(way=settings.way, workers=workers, fullest=str(fullest), **counts)


class Probe:
    """A model that takes steps on batches of any size, and the account of what devices hold meanwhile. All pairs are as
    long as any may be, `max_length` tokens: what is held grows with the batch and with nothing else."""

    def __init__(self, rank: int, size: int, settings: BertSettings) -> None:
        self.settings, self.devices, self.heartbeat = settings, devices_of(settings), Heartbeat()
        self.data = Pairs(settings.folder, "train", settings.max_length)
        self.default = self.devices[0] if settings.way == DDP else HOST
        """The device where a rank makes what has no operands."""
        with track_memory(self.devices, self.default) as account:
            with account.labelled("gradients"):  # the buckets of DDP
                self.step = Step(rank, size, settings)
            if isinstance(self.step.model, DistributedDataParallel):
                label_buckets(self.step.model, account)
            for _ in range(2):  # DDP rearranges its buckets in the second
                self.step.take(self.batch(settings.workers // size))

    def account_of(self, samples: int) -> Account:
        """The account of a step on that number of samples, on all devices of this process together."""
        self.heartbeat.beat()
        step, batch = self.step, self.batch(samples)
        step.optimizer.zero_grad()
        loss = partial(step.loss, batch)
        return track_step(step.model, step.optimizer, loss, self.devices, *batch, default=self.default)

    def batch(self, samples: int) -> PairBatch:
        """The first pairs, padded to `max_length`."""
        batch = self.data.__getitems__(range(samples))
        missing = self.settings.max_length - batch.input_ids.shape[1]
        ids, segments, mask = (F.pad(each, (0, missing)) for each in batch.inputs)
        return PairBatch(ids, segments, mask, batch.labels).to(device())
