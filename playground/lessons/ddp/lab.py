"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab

Whatever is compared starts from the same parameters and takes the same samples with the same dropout masks. The parts
are listed in settings.py; hooks and checkpoints have a file each, beside this one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.ddp_run import BucketRecorder, DDPRun, build_model, build_run, measure_difference
from playground.lessons.ddp.settings import (
    PARTS,
    AccumulationResult,
    BucketsResult,
    CapBuckets,
    EarlyTermination,
    GradientMemory,
    LabSettings,
    SamplerResult,
    SentBucket,
    UnevenResult,
    check_buckets,
    check_replicas,
)
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import report
from playground.runtime.meeting.agreement import all_gather_object, require_same_on_all_ranks
from playground.runtime.rank import steps
from playground.training.data import partition_dataset
from playground.training.replicas import largest_difference
from playground.training.step import backward
from playground.training.sync import GradSync


def run_lab(rank: int, size: int, settings: LabSettings) -> list[Any]:
    """The results of this rank for each part, in order; {"refused": words} for what the backend cannot do.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    torch.manual_seed(settings.training.seed)
    outcomes = []
    for number, name in enumerate(settings.parts):
        report(phase=f"the lab: {name}", step=number, steps=len(settings.parts))
        outcomes.append(steps.attempt(PARTS[name].code, rank, size, settings))
    return outcomes


PASSES = 3
"""Backward passes after which buckets stay as they are: with a static graph they are rebuilt after the second."""


def buckets(rank: int, size: int, settings: LabSettings) -> BucketsResult:
    """Gradients travel in buckets. In the first backward all are in one: DDP does not know yet in which order they get
    ready. When it has seen that, it rebuilds: a bucket is full once it holds its cap, and leaves when its last gradient
    is ready, while backward goes on.

    Raises `PlaygroundError` if the ranks' buckets differ.
    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
    """
    options = {"static_graph": settings.static_graph, "gradient_as_bucket_view": settings.gradient_as_bucket_view}
    order, passes_per_cap = [], []
    for cap in settings.bucket_caps:
        recorder, passes = record_passes(build_run(settings, cap, **options))
        order = recorder.ready
        passes_per_cap.append(passes)
    check_buckets(all_gather_object((order, passes_per_cap)))
    seconds = time_steps([build_run(settings, cap, **options) for cap in settings.bucket_caps], settings)
    caps = []
    for cap, passes, each in zip(settings.bucket_caps, passes_per_cap, seconds, strict=True):
        first, last, before = passes[0], passes[-1], passes.index(passes[-1]) + 1
        caps.append(CapBuckets(bucket_cap_mb=cap, first=first, rebuilt=last, rebuilt_before=before, seconds=each))
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
    """The memory of gradients after a backward, with DDP's option gradient_as_bucket_view or without."""
    run = build_run(settings, gradient_as_bucket_view=as_view)
    recorder, _ = record_passes(run)
    total = sum(param.grad.nbytes for param in run.params)
    return GradientMemory(gradient_as_bucket_view=as_view, gradients=total, outside=recorder.bytes_outside_buckets())


class SendEveryTime(GradSync):
    """Without no_sync: DDP averages in every backward, though only the sum of the gradients is needed."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def accumulation(rank: int, size: int, settings: LabSettings) -> list[AccumulationResult]:
    """Gradients of several batches, added up for one step. DDP sends in every backward, though only the sum is needed;
    under no_sync backward only adds, and the last one sends what has come together. (In float64, without dropout: what
    differs is rounding.)

    One result per way. Raises `PlaygroundError` if gradients differ by more than rounding.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
    """
    many = settings.training.accumulate
    model = build_model(settings.model, settings.training.seed).double().eval()
    run = DDPRun(model, settings.training, settings.bucket_caps[-1])
    recorder, _ = record_passes(run)
    small = [run.batch(number) for number in range(many)]
    images, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    results: list[AccumulationResult] = []
    whole: torch.Tensor | None = None
    for way, batches, sync in (
        ("one large batch", [(images, labels)], run.sync),
        ("all send", small, SendEveryTime(run.ddp)),
        ("no_sync but for the last", small, run.sync),
    ):
        recorder.clear()
        backward(run.optimizer, [partial(run.loss, run.ddp, batch, many) for batch in batches], sync)
        gradients = run.gradients()
        whole = gradients if whole is None else whole
        difference, messages = measure_difference(gradients, whole), len(recorder.sent)
        result = AccumulationResult(way=way, batches=len(batches), messages=messages, difference=difference)
        result.check()
        results.append(result)
    return results


BATCHES = 3
"""Batches of rank 0; every further rank has one more."""


def uneven_inputs(rank: int, size: int, settings: LabSettings) -> UnevenResult:
    """Rank r has 3 + r batches. Without Join the others would wait forever for the rank that is done first; within it
    that rank answers with zeros until all are done, and then takes over the parameters of the last.

    Raises `PlaygroundError` if replicas differ in the end.
    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """
    batches, steps = BATCHES + rank, 0
    run = build_run(settings)
    recorder = BucketRecorder(run.ddp)
    with Join([run.ddp]):
        for number in range(batches):
            run.step(number)
            steps += 1
    difference = largest_difference(run.ddp.module)
    check_replicas(difference, "after Join")
    counts = {"batches": batches, "steps": steps, "messages": len(recorder.sent)}
    early = terminate_early(build_run(settings), batches)
    return UnevenResult(**counts, difference=difference, without_joining=early)


def terminate_early(run: DDPRun, batches: int) -> EarlyTermination:
    """Take as many steps as there are until the first rank is done. What Join, told to raise, then says on this one."""
    steps, says = 0, None
    try:
        with Join([run.ddp], throw_on_early_termination=True):
            for number in range(batches):
                run.step(number)
                steps += 1
    except RuntimeError as error:
        says = str(error).splitlines()[0]
    all_gather_object(says)  # a failure of another kind would show here, at the ranks that are gone
    return EarlyTermination(steps=steps, says=says)


SAMPLES = 10


def sampler(rank: int, size: int, settings: LabSettings) -> list[SamplerResult]:
    """Who gets which sample. DistributedSampler gives all ranks equally many: some samples twice, or, with drop_last,
    some to none. Every epoch has the same order, unless set_epoch tells it which one this is. Our partition_dataset
    gives each sample to one rank.

    One result per way.
    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """
    samples = range(SAMPLES + (SAMPLES % size == 0))  # a number that cannot be shared out evenly
    results = []
    for way, mine in share_out(samples, size, settings.training.seed).items():
        counts = Counter(place for theirs in all_gather_object(mine) for place in theirs)
        doubled = [place for place in samples if counts[place] > 1]
        left_out = [place for place in samples if not counts[place]]
        results.append(SamplerResult(way=way, mine=mine, doubled=doubled, left_out=left_out))
    return results


def share_out(samples: range, size: int, seed: int) -> dict[str, list[int]]:
    """The positions of this rank's samples, in order, for each way."""
    without_set_epoch, with_set_epoch, dropping = (
        DistributedSampler(samples, seed=seed, drop_last=drop_last) for drop_last in (False, False, True)
    )
    ways = {f"no set_epoch, epoch {epoch}": list(without_set_epoch) for epoch in range(2)}
    for epoch in range(2):
        with_set_epoch.set_epoch(epoch)
        ways[f"set_epoch({epoch})"] = list(with_set_epoch)
    ways["drop_last"] = list(dropping)
    train_set, _ = partition_dataset(samples, size, seed)
    ways["partition_dataset"] = list(train_set.dataset.index)
    return ways
