"""The largest batch that fits if every device has so much memory, found with few steps.

python -m playground data-parallel --memory-cap 64MiB
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from playground.lessons.data_parallel.experiment import track_step
from playground.lessons.data_parallel.losses import LOSSES, new_batch, new_model_and_batch, new_optimizer
from playground.lessons.data_parallel.machine import resolve_devices
from playground.lessons.data_parallel.memory import Account
from playground.lessons.data_parallel.page import MAX_BATCH_SIZE, DataParallelSettings, LargestBatch, Way
from playground.measurement.interleave import Heartbeat
from playground.runtime.errors import UsageError
from playground.training.step import training_step
from playground.training.sync import GradSync

OF_THE_MODEL = ("parameters", "gradients", "optimizer state")
"""Labels of what a device holds that has the model, however small the batch."""
GROWTH = 4
"""Largest ratio of a probe's samples to those known to fit: a step that is too large is really taken."""


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
        gather=way.gather,
        output_device=way.output_device,
        devices=len(devices),
        batch=batch,
        fullest=str(fullest),
        at_peak=accounts[batch].at_peak[fullest],
    )


def largest_batch(
    peak: Callable[[int], int], cap: int, *, model: Mapping[str, int], limit: int, smallest: int = 1
) -> int:
    """The largest batch from `smallest` to `limit` with which no device holds more than `cap` bytes.

    `peak(batch)` takes a training step with `batch` samples and returns the bytes of the fullest device: more with more
    samples. That is nearly a straight line, so a line through two probes says where to look; that the batch fits and
    the next one does not is then seen, not predicted. `model` is what a device that has the model holds after a step,
    by label: what of it is `OF_THE_MODEL` is for the error message alone.

    Raises `UsageError` if not even the smallest batch fits.
    """
    peaks = {smallest: peak(smallest)}
    if peaks[smallest] > cap:
        raise UsageError(explain(cap, model, smallest, peaks[smallest]))
    fits, too_large, up, down = smallest, limit + 1, 1, 1
    while too_large - fits > 1:
        low, high = fits + up, too_large - down
        batch = max(low, min(predict(peaks, fits, cap), high)) if low <= high else (fits + too_large) // 2
        batch = min(batch, GROWTH * fits)
        peaks[batch] = peak(batch)
        if peaks[batch] <= cap:  # where peaks go up in steps, lines mislead: go further if this is where one led before
            fits, up, down = batch, 2 * up if batch == low else 1, 1
        else:
            too_large, up, down = batch, 1, 2 * down if batch == high else 1
    return fits


def predict(peaks: Mapping[int, int], fits: int, cap: int) -> int:
    """The last batch that fits, by the line through the largest one known to and the next probe, or else the first."""
    other = min((batch for batch in peaks if batch > fits), default=min(peaks))
    if other == fits or peaks[other] == peaks[fits]:
        return GROWTH * fits
    slope = (peaks[other] - peaks[fits]) / (other - fits)
    return fits + int((cap - peaks[fits]) / slope)


def explain(cap: int, model: Mapping[str, int], smallest: int, needed: int) -> str:
    """That the cap is too small, what the model alone needs, and what would do."""
    needs = {label: model[label] for label in OF_THE_MODEL if label in model}
    parts = ", ".join(f"{label} {count:,}" for label, count in needs.items())
    samples = "one sample" if smallest == 1 else f"{smallest} samples"
    return (
        f"a memory cap of {cap:,} bytes is too small: the model alone needs {sum(needs.values()):,} ({parts}), "
        f"with {samples} {needed:,}: allow at least as many"
    )
