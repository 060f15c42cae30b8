"""A simulated link. On one machine the memory is the network: averaging ends before backward can
hide much of it. Over a simulated link every message takes at least as long as it would at a given
speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Link:
    """The only link of this rank; messages go over it one after the other. `gbit`: its speed in
    10^9 bits per second.

    Only bytes are simulated. The latency, and the work of the processor, are those of the backend.
    """

    def __init__(self, gbit: float) -> None:
        self.seconds_per_byte = 8e-9 / gbit
        self.free = 0.0

    def slow_down(
        self, collective: Callable[..., Any], hops: Callable[[int], float]
    ) -> Callable[..., Any]:
        """`collective(tensor, …, group=None, async_op=False)` over this link. `hops(N)`: how many
        times the tensor a rank sends in a group of N."""

        def call(
            tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any
        ) -> Transmission | None:
            size = dist.get_world_size(options.get("group"))
            self.free = (
                max(self.free, time.monotonic())
                + hops(size) * tensor.nbytes * self.seconds_per_byte
            )
            transmission = Transmission(
                collective(tensor, *args, async_op=True, **options), self.free
            )
            if async_op:
                return transmission
            transmission.wait()
            return None

        return call

    def all_reduce(self, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        """An all-reduce over this link: a rank sends 2 (N - 1) / N of the tensor, as by a ring."""
        return self.slow_down(all_reduce, lambda size: 2 * (size - 1) / size)

    def put_under(self, model: DistributedDataParallel) -> None:
        """Let DistributedDataParallel average its buckets over this link, by a communication
        hook."""
        all_reduce = self.all_reduce(dist.all_reduce)

        def average(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            tensor = bucket.buffer().div_(dist.get_world_size())
            transmission = all_reduce(tensor, async_op=True)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            threading.Thread(
                target=lambda: (transmission.wait(), future.set_result(tensor)), daemon=True
            ).start()
            return future

        model.register_comm_hook(None, lambda _, bucket: average(bucket))


class Transmission:
    """A message under way: `work` is the backend's, `until` the moment when the link will have
    carried its bytes."""

    def __init__(self, work: Any, until: float) -> None:
        self.work = work
        self.until = until

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        if (left := self.until - time.monotonic()) > 0:
            time.sleep(left)
