"""When a stage worked: the time of every forward and backward since all ranks began together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from playground.lessons.pipeline.results import Slot
from playground.runtime import device, host
from playground.runtime.agreement import all_gather_object


class Stopwatch:
    """Seconds since all ranks made theirs together. Ranks of a host have one clock, so that their times can be compared
    exactly; those of several hosts began when they left a barrier, at almost the same moment."""

    def __init__(self) -> None:
        self.on_gpu = device().type == "cuda"
        self.slots: list[Slot] = []
        dist.barrier()
        here = host.host_id()
        self.origin = min(start for there, start in all_gather_object((here, self.now())) if there == here)

    def now(self) -> float:
        """Seconds, when this rank's work so far is done. On a GPU only what was computed: to wait for messages, too,
        would be to wait for a neighbour that may be waiting for us."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def slot(self, kind: str, microbatch: int) -> Iterator[None]:
        """Take the time of the block."""
        start = self.now()
        yield
        end = self.now()
        self.slots.append(Slot(kind=kind, microbatch=microbatch, start=start - self.origin, end=end - self.origin))
