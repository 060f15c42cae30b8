"""The programs as torch alone runs and explains them."""

from __future__ import annotations

import torch.distributed as dist

from playground.lessons.failures import lesson


def listen(rank: int, size: int, name: str, in_detail: bool) -> tuple[str, str]:
    """What torch says of a program to this rank, and what torch's flight recorder has of it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL if in_detail else dist.DebugLevel.OFF)
    store, *_ = next(dist.rendezvous("env://"))
    return lesson.run_alone(rank, size, name, store)
