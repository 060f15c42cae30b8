"""The programs as torch alone runs and explains them."""

from __future__ import annotations

import torch.distributed as dist

from playground.lessons.failures import lesson
from playground.runtime import report


def listen(rank: int, size: int, names: list[str]) -> list[tuple[str, str]]:
    """What torch says of each program to this rank, and what torch's flight recorder has of it."""
    dist.set_debug_level(dist.DebugLevel.OFF)
    store, *_ = next(dist.rendezvous("env://"))
    found = []
    for name in names:
        report(program=name)
        earlier, said = len(lesson.recorded_calls()), lesson.run_alone(rank, size, name, store)
        found.append((said, lesson.describe(lesson.recorded_calls()[earlier:])))
    return found


def listen_in_detail(rank: int, size: int, names: list[str]) -> list[str]:
    """What torch says of each program with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    store, *_ = next(dist.rendezvous("env://"))
    said = []
    for name in names:
        report(program=name)
        said.append(lesson.run_alone(rank, size, name, store))
    return said
