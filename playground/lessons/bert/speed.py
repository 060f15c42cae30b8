"""How fast the ways are: samples per second, and the share of a step in which each device computes."""

from __future__ import annotations

from statistics import median

from playground.lessons.bert.results import Speed, Use
from playground.lessons.bert.settings import BertSettings
from playground.lessons.bert.step import Step, devices_of
from playground.lessons.data_parallel.memory import track_utilisation
from playground.measurement.interleave import Heartbeat, slowest, timed

WARM_UP, STEPS = 3, 10
"""Steps that are not counted, and steps that are."""
LOOKED_ON = 3
"""Steps in which operations are timed."""


def speed(rank: int, size: int, settings: BertSettings) -> Speed:
    """Samples per second, where more workers share the same batches. One worker is one device, with nobody to wait for.

    A step's time is that of the slowest rank, from fetching the batch to the optimizer's end; the median of several.
    """
    per_step = median(slowest(time_steps(Step(rank, size, settings))))
    return Speed(
        way=settings.way, workers=settings.workers, seconds=per_step,
        samples_per_second=settings.batch_size / per_step,
    )  # fmt: skip


def time_steps(step: Step) -> list[float]:
    """Seconds of some steps on this rank, after the first few."""
    heartbeat, seconds = Heartbeat(), []
    for _ in range(WARM_UP + STEPS):
        heartbeat.beat()
        seconds.append(timed(step)())
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
