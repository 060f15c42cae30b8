"""The ladder: every rung from the tutorial's loop to DistributedDataParallel, by its name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from playground.training.gradients import (
    AllReduce,
    average_gradients,
    average_gradients_bucketed,
    average_gradients_flat,
    average_gradients_none_safe,
)
from playground.training.overlap import OverlappedAverage
from playground.training.sync import AverageAfterBackward, Sync

Rung = Callable[[nn.Module, AllReduce, int], Sync]
"""Made once for a model, before its first backward: `rung(model, all_reduce, bucket_cap)`, the last in bytes."""

RUNGS: dict[str, Rung] = {
    "per-parameter": lambda model, all_reduce, cap: AverageAfterBackward(average_gradients, model, all_reduce),
    "none-safe": lambda model, all_reduce, cap: AverageAfterBackward(average_gradients_none_safe, model, all_reduce),
    "flat": lambda model, all_reduce, cap: AverageAfterBackward(average_gradients_flat, model, all_reduce),
    "bucketed": lambda model, all_reduce, cap: AverageAfterBackward(average_gradients_bucketed, model, all_reduce, cap),
    "overlapped": OverlappedAverage,
}
"""Naive first."""
