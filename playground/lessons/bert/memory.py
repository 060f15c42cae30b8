"""What each device holds in a training step, by each way; and how large a batch may be under a memory cap."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.bert.results import Held, LargestBatch
from playground.lessons.bert.settings import DDP, BertSettings
from playground.lessons.bert.step import Step, devices_of
from playground.lessons.data_parallel.largest_batch import largest_batch
from playground.lessons.data_parallel.machine import HOST
from playground.lessons.data_parallel.memory import Account, label_buckets, track_memory
from playground.measurement.interleave import Heartbeat
from playground.runtime import device
from playground.training.sentence_pairs.pairs import PairBatch, Pairs


def memory(rank: int, size: int, settings: BertSettings) -> list[Held]:
    """What each device holds at its peak. DataParallel's first device alone has all of the gradients and Adam's state;
    with DDP every device has them, and nobody more than the others."""
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
        """Of the fullest device of any rank, with so many samples on every worker."""
        fullest = torch.tensor(max(account_of(per_rank * samples).peak.values()), device=device())
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        return int(fullest)

    samples = largest_batch(peak, settings.memory_cap, model=held, limit=len(probe.data) // settings.workers)
    account = account_of(per_rank * samples)
    fullest = max(probe.devices, key=account.peak.__getitem__)
    return LargestBatch(
        way=settings.way, workers=settings.workers, batch_size=samples * settings.workers, fullest=str(fullest),
        peak=account.peak[fullest],
    )  # fmt: skip


class Probe:
    """A model that takes steps on batches of any size, and the account of what devices hold meanwhile.

    All pairs are as long as any may be, `max_length` tokens: what is held grows with the batch and with nothing else.
    """

    def __init__(self, rank: int, size: int, settings: BertSettings) -> None:
        self.settings, self.devices, self.heartbeat = settings, devices_of(settings), Heartbeat()
        self.data = Pairs(settings.folder, "train", settings.max_length)
        with self.track() as account:
            with account.labelled("gradients"):  # the buckets of DDP
                self.step = Step(rank, size, settings)
            if isinstance(self.step.model, DistributedDataParallel):
                label_buckets(self.step.model, account)
            for _ in range(2):  # DDP arranges its buckets anew in the second
                self.step.take(self.batch(settings.workers // size))

    def track(self) -> contextlib.AbstractContextManager[Account]:
        """In a rank, what is made without operands is made on its device."""
        return track_memory(self.devices, default=self.devices[0] if self.settings.way == DDP else HOST)

    def account_of(self, samples: int) -> Account:
        """A step on so many samples, on all devices of this process together."""
        self.heartbeat.beat()
        with self.track() as account:
            self.step.optimizer.zero_grad()
            account.put_module(self.step.model, self.devices[0])
            account.put_state(self.step.optimizer, self.devices[0])
            batch = self.batch(samples)
            account.put(*batch, device=self.devices[0], label="inputs")
            self.step.take(batch, account.moment)
        return account

    def batch(self, samples: int) -> PairBatch:
        """The first pairs, padded to `max_length`."""
        batch = self.data.__getitems__(range(samples))
        missing = self.settings.max_length - batch.input_ids.shape[1]
        ids, segments, mask = (F.pad(each, (0, missing)) for each in batch.inputs)
        return PairBatch(ids, segments, mask, batch.labels).to(device())
