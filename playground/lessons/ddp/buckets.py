"""Which buckets DistributedDataParallel builds, when each leaves, and where gradients lie.

    python -m playground ddp --only buckets --model resnet18 --bucket-cap-mb 1,5,25

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

from functools import partial
from random import Random
from statistics import median

from playground.lessons.ddp.ddp_run import BucketRecorder, DDPRun, build_run
from playground.lessons.ddp.settings import (
    BucketsResult,
    CapBuckets,
    GradientMemory,
    LabSettings,
    SentBucket,
    check_buckets,
)
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime.agreement import all_gather_object

PASSES = 3
"""Backward passes after which buckets stay as they are: with a static graph they are rebuilt after the second."""


def buckets(rank: int, size: int, settings: LabSettings) -> BucketsResult:
    """Gradients travel in buckets. In the first backward all are in one: DDP does not know yet in which order they get
    ready. When it has seen that, it rebuilds: a bucket is full once it holds its cap, and leaves when its last gradient
    is ready, while backward goes on.

    Raises `PlaygroundError` if the ranks' buckets differ.
    """
    options = {"static_graph": settings.static_graph, "gradient_as_bucket_view": settings.gradient_as_bucket_view}
    order, passes_per_cap = [], []
    for cap in settings.bucket_caps:
        recorder, passes = record_passes(build_run(settings, cap, **options))
        order = recorder.ready
        passes_per_cap.append(passes)
    check_buckets(all_gather_object((order, passes_per_cap)))
    seconds = time_steps([build_run(settings, cap, **options) for cap in settings.bucket_caps], settings)
    caps = [
        CapBuckets(
            bucket_cap_mb=cap,
            first=passes[0],
            rebuilt=passes[-1],
            rebuilt_before=passes.index(passes[-1]) + 1,
            seconds=each,
        )
        for cap, passes, each in zip(settings.bucket_caps, passes_per_cap, seconds, strict=True)
    ]
    memory = [measure_memory(settings, as_view) for as_view in (False, True)]
    return BucketsResult(order=order, caps=caps, memory=memory)


def record_passes(run: DDPRun) -> tuple[BucketRecorder, list[list[SentBucket]]]:
    """The buckets of each of `PASSES` backward passes, as they left. The recorder still holds the last."""
    recorder, passes = BucketRecorder(run.ddp), []
    for number in range(PASSES):
        recorder.clear()
        run.backward(number)
        passes.append(recorder.sent)
    return recorder, passes


def time_steps(runs: list[DDPRun], settings: LabSettings) -> list[float]:
    """Seconds of each run's step on its slowest rank, the median. Nothing is recorded in them, which would be timed."""
    for run in runs * PASSES:
        run.step(0)
    calls = [timed(partial(run.step, 0)) for run in runs]
    seconds = interleave(calls, range(settings.steps), Random(settings.training.seed))
    return [median(slowest(each)) for each in seconds]


def measure_memory(settings: LabSettings, as_view: bool) -> GradientMemory:
    """What gradients take after a backward, with DDP's option gradient_as_bucket_view or without."""
    run = build_run(settings, gradient_as_bucket_view=as_view)
    recorder, _ = record_passes(run)
    total = sum(param.grad.nbytes for param in run.params)
    return GradientMemory(gradient_as_bucket_view=as_view, gradients=total, outside=recorder.bytes_outside_buckets())
