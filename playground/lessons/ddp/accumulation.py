"""Gradient accumulation under DistributedDataParallel, with no_sync and without it.

    python -m playground ddp --only accumulation --accumulate 8

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch

from playground.lessons.ddp.buckets import record_passes
from playground.lessons.ddp.ddp_run import DDPRun, build_model, measure_difference
from playground.lessons.ddp.results import AccumulationResult
from playground.lessons.ddp.settings import LabSettings
from playground.training.step import backward
from playground.training.sync import GradSync


class SendEveryTime(GradSync):
    """Without no_sync: DDP averages in every backward, though only the sum of the gradients is needed."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def accumulation(rank: int, size: int, settings: LabSettings) -> list[AccumulationResult]:
    """Gradients of several batches, added up for one step. DDP sends in every backward, though only the sum is needed;
    under no_sync backward only adds, and the last one sends what has come together. (In float64, without dropout: what
    differs is rounding.)

    One result per way. Raises `PlaygroundError` if gradients differ by more than rounding.
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
        result = AccumulationResult(
            way=way, batches=len(batches), messages=len(recorder.sent), difference=measure_difference(gradients, whole)
        )
        result.check()
        results.append(result)
    return results
