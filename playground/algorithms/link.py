"""A simulated link. On one machine the memory is the network: averaging ends before backward can
hide much of it. Over a simulated link every message takes at least as long as it would at a given
speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms.bytes_sent import times_sent
from playground.algorithms.traffic import sent_by
from playground.tap import Call, Observer

_one_at_a_time = threading.Lock()
"""Held by a thread that hands bytes to a link."""


class Link(Observer):
    """The only link of this rank; messages go over it one after the other. `gbit`: its speed in
    10^9 bits per second. It carries what `all_reduce` sends or, as an observer, whatever the rank
    calls:

    - A call that blocks ends no earlier than the link would have carried its bytes.
    - An asynchronous one returns at once, and a wait for it ends no earlier: meanwhile the program
      computes.
    - What DistributedDataParallel, or a hook of its, calls in a backward pass delays the end of
      that pass. What torch calls in C++ elsewhere blocks.

    A rank that the link delays sleeps. Only bytes are simulated. The latency, and the work of the
    processor, are those of the backend. A receive ends when its message is there: the link delays
    only the sender.
    """

    looks_inside = True

    def __init__(self, gbit: float) -> None:
        self.seconds_per_byte = 8e-9 / gbit
        self.free = 0.0
        self.ends: dict[int, float] = {}
        """When the link will have carried the bytes of a call, by its number."""
        self.backwards: list[list[Call]] = []
        """The asynchronous calls in each backward pass under way: on a GPU threads of
        autograd's call some."""

    def carry(self, nbytes: float) -> float:
        """The moment when the link will have carried so many bytes more."""
        with _one_at_a_time:
            self.free = max(self.free, time.monotonic()) + nbytes * self.seconds_per_byte
            return self.free

    def begun(self, call: Call) -> None:
        if nbytes := sent_by(call):
            self.ends[call.number] = self.carry(nbytes)

    def returned(self, call: Call) -> None:
        if self.backwards:
            self.backwards[-1].append(call)
        elif call.is_native:
            self.deliver([call])

    def done(self, calls: Sequence[Call]) -> None:
        if calls[0].waits_in_call:
            self.deliver(calls)

    def waited(self, calls: Sequence[Call]) -> None:
        self.deliver(calls)

    def failed(self, calls: Sequence[Call], error: BaseException) -> None:
        self.dropped(calls)

    def dropped(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.ends.pop(call.number, None)

    def deliver(self, calls: Sequence[Call]) -> None:
        """Wait until the link has carried these calls."""
        wait_until(max((self.ends.pop(call.number, 0.0) for call in calls), default=0.0))

    def backward_begun(self, root: Any) -> None:
        self.backwards.append([])

    def backward_ended(self) -> None:
        self.deliver([call for call in self.backwards.pop() if call.is_left_to_backward])

    def all_reduce(self, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        """`all_reduce(tensor, …, group=None, async_op=False)` over this link, as by a ring."""

        def call(
            tensor: torch.Tensor, *args: Any, async_op: bool = False, **options: Any
        ) -> Transmission | None:
            size = dist.get_world_size(options.get("group"))
            until = self.carry(times_sent(size, "all_reduce") * tensor.nbytes)
            work = all_reduce(tensor, *args, async_op=True, **options)
            transmission = Transmission(work, until)
            if async_op:
                return transmission
            transmission.wait()
            return None

        return call

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
        wait_until(self.until)


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
