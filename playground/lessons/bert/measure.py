"""The cost of each way: time, memory, and what averaging gradients can hide behind."""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.bert.experiment import batches, build_model, wrap_model
from playground.lessons.bert.lesson import loss_of_logits
from playground.lessons.bert.page import (
    AveragingCost,
    BertSettings,
    DeviceMemory,
    KeptActivations,
    Speed,
)
from playground.lessons.bert.pairs import PairBatch, Pairs
from playground.lessons.data_parallel.experiment import track_step
from playground.lessons.data_parallel.machine import HOST
from playground.lessons.data_parallel.memory import label_buckets, track_memory
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import device
from playground.training.grad_syncs import DDP
from playground.training.memory import bytes_kept
from playground.training.settings import FLOAT32
from playground.training.step import mean_loss_part, training_step
from playground.training.step_times import (
    TimedReplica,
    count_messages,
    new_rung,
    summarize,
    time_in_turn,
)
from playground.training.sync import GradSync


class BertRun:
    """Called, it takes a step on this rank's part of the next batch."""

    def __init__(self, rank: int, size: int, settings: BertSettings) -> None:
        self.model, loss_of = wrap_model(settings)
        self.loss = partial(loss_of, self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.lr, fused=True)
        self.coming = batches(settings, rank, size)

    def __call__(self) -> None:
        self.take(next(self.coming))

    def take(self, batch: PairBatch) -> None:
        training_step(self.optimizer, [partial(self.loss, batch)], GradSync(self.model))


def devices_of(settings: BertSettings) -> list[torch.device]:
    """The devices of this process, numbered, as accounts of memory want them."""
    if settings.way == DDP:
        return [torch.device(device().type, device().index or 0)]
    return [torch.device(name) for name in settings.devices]


WARM_UP, STEPS = 3, 10
"""Steps, or rounds of them, that are not counted, and those that are."""


def averaging(rank: int, size: int, settings: BertSettings) -> list[AveragingCost]:
    """The cost of averaging the gradients in a step: with the rung `settings.sync` of the ladder,
    and with DDP. Both take the same steps with Adam, in turn."""
    torch.set_num_threads(settings.threads)
    start, batch = build_model(settings), next(batches(settings, rank, size))
    new_adam = partial(torch.optim.Adam, lr=settings.lr, fused=True)
    take_step = methodcaller("step", batch.inputs, batch.labels, settings.batch_size / size)
    messages, replicas = [], []

    def mean_loss(
        logits: torch.Tensor, labels: torch.Tensor, samples_per_rank: float
    ) -> torch.Tensor:
        return mean_loss_part(logits.log_softmax(-1), labels, samples_per_rank)

    for name in (settings.sync, DDP):
        new_sync = partial(new_rung, name, bucket_cap=settings.bucket_cap)
        messages.append(count_messages(new_sync, start, batch.inputs))
        replicas.append(TimedReplica(name, start, new_sync, dist.all_reduce, new_adam, mean_loss))
        take_step(replicas[-1])
    seconds = time_in_turn(replicas, take_step, range(WARM_UP + STEPS), settings.seed, WARM_UP)
    return [
        AveragingCost(
            way=rung.rung,
            seconds=rung.p50,
            exposed=rung.exposed,
            alone=rung.alone,
            hidden=rung.hidden,
            messages=rung.messages,
            bytes=rung.bytes,
            early_bytes=rung.early_bytes,
            difference_to_ddp=rung.difference_to_ddp,
            caveat=rung.caveat,
        )
        for rung in summarize(replicas, messages, seconds)
    ]


def speed(rank: int, size: int, settings: BertSettings) -> Speed:
    """Samples per second, where more workers share the same batches. One worker is one device,
    which waits for none.

    A step's time is that of the slowest rank, from fetching the batch to the optimizer's end; the
    median of several.
    """
    [seconds] = interleave(
        [timed(BertRun(rank, size, settings))], range(WARM_UP + STEPS), Random(0)
    )
    per_step = median(slowest(seconds[WARM_UP:]))
    return Speed(
        way=settings.way,
        workers=settings.workers,
        seconds=per_step,
        samples_per_second=settings.batch_size / per_step,
    )


def memory(rank: int, size: int, settings: BertSettings) -> list[DeviceMemory]:
    """Each device's memory at its peak. DataParallel's first device alone has all of the gradients
    and Adam's state; with DDP every device has them, and none more than the others.

    All pairs are as long as any may be, `max_length` tokens: what is held depends on the size of
    the batch alone.
    """
    devices = devices_of(settings)
    default = devices[0] if settings.way == DDP else HOST  # where a rank makes what has no operands
    with track_memory(devices, default) as account:
        with account.labelled("gradients"):  # the buckets of DDP
            step = BertRun(rank, size, settings)
        if isinstance(step.model, DistributedDataParallel):
            label_buckets(step.model, account)
        for _ in range(2):  # DDP rearranges its buckets in the second
            step.take(pad_pairs(settings, settings.workers // size))
    batch = pad_pairs(settings, settings.batch_size // size)
    step.optimizer.zero_grad()
    loss = partial(step.loss, batch)
    account = track_step(step.model, step.optimizer, loss, devices, *batch, default=default)
    return [
        DeviceMemory(device=str(each), peak=account.peak[each], held=account.at_peak[each])
        for each in devices
    ]


def activations(rank: int, size: int, settings: BertSettings) -> KeptActivations:
    """What autograd keeps for the backward of a batch."""
    model = build_model(settings)
    batch = pad_pairs(settings, settings.batch_size)
    kept = bytes_kept(model, partial(loss_of_logits, model, batch))
    config = settings.config
    is_counted = settings.dtype == FLOAT32 and not config.dropout
    is_counted &= config.intermediate == 4 * config.width  # as the formula has it
    recompute = settings.checkpoint_activations
    return KeptActivations(
        kept=kept,
        closed_form=settings.expect_kept(recompute=recompute) if is_counted else None,
        in_float32=settings.expect_kept(recompute=False),
    )


def pad_pairs(settings: BertSettings, samples: int) -> PairBatch:
    """The first pairs, padded to `max_length`."""
    batch = Pairs(settings.folder, "train").__getitems__(range(samples))
    missing = settings.max_length - batch.input_ids.shape[1]
    ids, segments, mask = (F.pad(each, (0, missing)) for each in batch.inputs)
    return PairBatch(ids, segments, mask, batch.labels).to(device())
