"""Buckets of gradients, of DistributedDataParallel and of ours, from when they leave until their sum is there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from playground.recording.hooks.algorithms import RecordedCollectiveWork
from playground.recording.hooks.groups import Groups
from playground.recording.hooks.tensors import bytes_of
from playground.recording.hooks.works import IssuedWorks, RecordedWork
from playground.recording.layout import NONE
from playground.recording.recorder import Recorder
from playground.recording.recording import BUCKET, COLLECTIVE

HOOK_ID = 20170
"""Of our hooks of a process group, among others'."""
CALLED = {
    "ALLREDUCE": "all_reduce", "BROADCAST": "broadcast", "ALLGATHER": "all_gather", "BARRIER": "barrier",
    "ALLGATHER_BASE": "all_gather_into_tensor", "REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
}  # fmt: skip
"""What DistributedDataParallel calls in C++, by the names of its Python functions."""


class BucketHooks:
    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        self.recorder, self.groups = recorder, groups
        self.left = 0
        """How many buckets have left since backward began."""
        self.listened_to: list[Any] = []
        self.under_way: dict[tuple[int, int], int] = {}
        """Numbers of the events of calls that are being issued: by group and operation."""
        self.issued = IssuedWorks(recorder)

    @contextlib.contextmanager
    def during_backward(self, number: int) -> Iterator[None]:
        """In this block, what leaves in any of autograd's threads is a bucket of that backward pass."""
        backwards = self.recorder.backwards
        if not backwards:
            self.left = 0
        backwards.append(number)
        try:
            yield
        finally:
            backwards.remove(number)
            self.issued.finish_done()

    def begin(self, flat: torch.Tensor) -> int:
        """The next bucket leaves."""
        index, self.left = self.left, self.left + 1
        return self.recorder.begin(
            BUCKET, f"bucket {index}", bytes_of(flat), flat.shape, self.groups.ranks_of(None),
            source=self.recorder.sources.find(), parent=self.recorder.around(),
        )  # fmt: skip

    def wrap_start(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Of `Bucket`: starts its all-reduce."""

        @functools.wraps(real)
        def start(bucket: Any, all_reduce: Any) -> Any:
            number = self.begin(bucket.flat)
            self.recorder.open(number)
            work = real(bucket, all_reduce)
            self.recorder.leave(number)
            if isinstance(work, RecordedCollectiveWork):
                work.work.future.add_done_callback(lambda _: self.recorder.end(number))
            elif isinstance(work, RecordedWork):
                work.pending = [*work.pending, (number, ())]
            else:  # an all-reduce that was bound before the recording began
                work = RecordedWork(self.recorder, work, [(number, ())])
            return work

        return start

    def wrap_average_together(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Averages the gradients of one bucket, and waits for it."""

        @functools.wraps(real)
        def average_together(grads: Any, all_reduce: Any) -> None:
            flat = torch.empty(sum(grad.numel() for grad in grads), dtype=grads[0].dtype, device="meta")
            number = self.recorder.open(self.begin(flat))
            real(grads, all_reduce)
            self.recorder.close(number)

        return average_together

    def listen(self, group: Any) -> None:
        """Hear of what is called in C++, as DistributedDataParallel does. (Older versions of torch do not tell.)"""
        if group in self.listened_to or not hasattr(group, "register_pre_hook"):
            return
        self.listened_to.append(group)
        group.register_pre_hook(HOOK_ID, functools.partial(self.before_call, group))
        group.register_post_hook(HOOK_ID, functools.partial(self.after_call, group))

    def remove(self) -> None:
        """Listen no more."""
        self.issued.finish_done()
        for group in self.listened_to:
            with contextlib.suppress(RuntimeError):  # it may have been destroyed
                group.unregister_pre_hook(HOOK_ID)
                group.unregister_post_hook(HOOK_ID)
        self.listened_to.clear()

    def before_call(self, group: Any, call: Any) -> None:
        recorder = self.recorder
        if recorder.thread.is_inside or call.name.name not in CALLED:
            return  # of a function that is recorded as it is called, or a message of our algorithms
        tensors, around = call.input_tensors, recorder.around()
        if around in recorder.backwards and call.name.name == "ALLREDUCE" and tensors[0].is_floating_point():
            number = self.begin(tensors[0])
        else:
            number = recorder.begin(
                COLLECTIVE, CALLED[call.name.name], sum(map(bytes_of, tensors)),
                tensors[0].shape if len(tensors) == 1 else (), self.groups.ranks_of(group),
                NONE if call.root < 0 else self.groups.ranks_of(group)[call.root],
                source=recorder.sources.find(1),  # there may be no other frame: threads of torch's come here
                parent=around,
            )  # fmt: skip
        self.under_way[id(group), call.op_id] = number

    def after_call(self, group: Any, call: Any) -> None:
        """The call has been issued; it is over when its future is."""
        number = self.under_way.pop((id(group), call.op_id), None)
        if number is None:
            return
        if call.work is None:
            self.recorder.end(number)
        else:
            self.issued.add(call.work, (number, ()))
