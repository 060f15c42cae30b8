"""How large a batch may be if every device has so much memory, by each way to the loss.

python -m playground data-parallel --memory-cap 64MiB
"""

from __future__ import annotations

from functools import partial

import torch

from playground.lessons.data_parallel.account import Account
from playground.lessons.data_parallel.devices import resolve_devices
from playground.lessons.data_parallel.language import new_batch, new_model_and_batch, new_optimizer
from playground.lessons.data_parallel.largest_batch import largest_batch
from playground.lessons.data_parallel.lesson import LOSSES, track_step
from playground.lessons.data_parallel.results import LargestBatch
from playground.lessons.data_parallel.settings import MAX_BATCH_SIZE, DataParallelSettings, Way
from playground.measurement.interleave import Heartbeat
from playground.training.step import training_step
from playground.training.sync import GradSync


def largest_batches(rank: int, size: int, settings: DataParallelSettings, cap: int) -> list[LargestBatch]:
    """The largest batch with which no device holds more than the cap, found by steps that are really taken.

    For one device alone, then for each of `settings.ways`. Raises `UsageError` if one sample is too many.
    """
    alone = settings.on_first_device
    return [
        *(find_largest(alone, way, cap) for way in alone.ways),
        *(find_largest(settings, way, cap) for way in settings.ways if len(settings.devices) > 1),
    ]


def find_largest(settings: DataParallelSettings, way: Way, cap: int) -> LargestBatch:
    """By one way, on all devices of `settings`."""
    devices = resolve_devices(settings.devices)
    model, *sample = new_model_and_batch(1, settings.seed, devices[0])
    optimizer = new_optimizer(model, settings.optimizer)
    loss_on = partial(LOSSES[way.gather], model, devices=devices, output=torch.device(way.output_device))
    training_step(optimizer, [partial(loss_on, *sample)], GradSync(model))  # from here on it has its state
    accounts: dict[int, Account] = {}
    heartbeat = Heartbeat()

    def peak(batch_size: int) -> int:
        heartbeat.beat()
        tokens, targets = new_batch(batch_size)
        accounts[batch_size] = track_step(model, optimizer, partial(loss_on, tokens, targets), devices)
        return max(accounts[batch_size].peak.values())

    held = track_step(model, optimizer, partial(loss_on, *sample), devices).held_by_label[devices[0]]
    batch = largest_batch(peak, cap, model=held, limit=MAX_BATCH_SIZE)
    peaks = accounts[batch].peak
    fullest = max(devices, key=peaks.__getitem__)
    return LargestBatch(
        gather=way.gather, output_device=way.output_device, devices=len(devices), batch=batch, fullest=str(fullest),
        at_peak=accounts[batch].at_peak[fullest],
    )  # fmt: skip
