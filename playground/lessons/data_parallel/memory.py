"""What each device holds, and what moves between devices: real for GPUs, an account kept here for virtual ones.

For torch all of `cpu:0 … cpu:3` is one CPU. In a `with track_memory(devices) as account:` they are told apart as GPUs
are: the result of an operation lies where its operands lie, and only a copy takes it elsewhere; an operation on tensors
of two devices is an error. The bytes of a storage count from when an operation returns it until the last tensor that
uses it is gone: parameters and their copies, inputs, outputs, activations saved for backward, gradients, the
optimizer's state. What an operation needs only while it runs does not count.

On GPUs the totals are those of torch's allocator (`torch.cuda.max_memory_allocated`), for the whole process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from playground.lessons.data_parallel.account import HOST, Account, Move
from playground.training import device_work

MOVED_LABELS = {
    "scatter": "inputs", "loss": "inputs", "targets": "inputs", "gradients of inputs": "gradients",
    "replicate": "parameters", "reduce": "gradients",
    "gather": "gathered outputs", "gradients of outputs": "gradients",
}  # fmt: skip
"""What the account calls the copies that each part of a step makes; those of other parts as the phase of the step."""


class AllocationTracker(TorchDispatchMode):
    """Sees every operation of its thread, backward's too, and puts what it makes on the account.

    What has no operands is made on `device`. If the account is `timed`, operations are timed too: in seconds that the
    thread computes, not those in which it waits for a core or for the GIL.
    """

    def __init__(self, account: Account, device: torch.device) -> None:
        super().__init__()
        self.account, self.device = account, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - start
        move = getattr(_thread, "move", None)
        device, label = move or (self.common_device(func, args, kwargs), None)
        if device != HOST:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.account.put(*made, device=device, label=label)
        if self.account.timed and not move and func.namespace == "aten":  # neither a copy nor communication
            self.account.add_busy(device, seconds)
        return result

    def common_device(self, func: Any, *operands: Any) -> torch.device:
        """Where all operands lie. Raises `RuntimeError` if they do not lie together (one number may, as in torch)."""
        tensors = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor)]
        devices = {device_of(tensor) for tensor in tensors if tensor.dim()} - {HOST}
        devices = devices or {device_of(tensor) for tensor in tensors} - {HOST}
        if len(devices) > 1:
            raise RuntimeError(
                f"{func}: operands on {' and '.join(sorted(map(str, devices)))}: copy them to one device"
            )
        return devices.pop() if devices else self.device


class GpuAccount(Account):
    """Of GPUs: moves and labels are recorded as everywhere, how many bytes there are the allocator says."""

    def __init__(self, devices: Sequence[torch.device], timed: bool = False) -> None:
        super().__init__(devices, timed)
        self.reset_peak()

    @property
    def held(self) -> dict[torch.device, int]:
        return {device: torch.cuda.memory_allocated(device) for device in self._held}

    @property
    def peak(self) -> dict[torch.device, int]:
        return {device: torch.cuda.max_memory_allocated(device) for device in self._held}

    @property
    def at_peak(self) -> dict[torch.device, dict[str, int]]:
        """With what the tensors do not account for as "other": rounding, and what libraries keep."""
        peak = self.peak
        return {
            device: {**labels, "other": max(0, peak[device] - sum(labels.values()))}
            for device, labels in super().at_peak.items()
        }

    def reset_peak(self) -> None:
        super().reset_peak()
        for device in self._held:
            torch.cuda.reset_peak_memory_stats(device)

    def put(self, *tensors: torch.Tensor, device: torch.device, label: str | None = None) -> None:
        """A GPU's tensor says itself where it lies; one in the host's memory does not count."""
        for tensor in tensors:
            if tensor.is_cuda:
                super().put(tensor, device=tensor.device, label=label)


_accounts: list[Account] = []
_thread = threading.local()  # tracker: of this thread; move: (target, label) while it copies


@contextlib.contextmanager
def track_memory(
    devices: Sequence[torch.device], default: torch.device = HOST, timed: bool = False
) -> Iterator[Account]:
    """Keep an account of `devices` meanwhile. It slows every operation down: do not time anything in it.

    `default` is where what has no operands is made. In a rank, all of whose work is one device's, it is that device:

        device = torch.device("cpu", 0)
        with track_memory([device], default=device) as account:
            account.put_module(model, device)
    """
    account = (GpuAccount if devices[0].type == "cuda" else Account)(devices, timed)
    _accounts.append(account)
    try:
        with track_thread(default):
            yield account
    finally:
        _accounts.remove(account)


@contextlib.contextmanager
def track_thread(device: torch.device) -> Iterator[None]:
    """Have this thread, which works for `device` meanwhile, counted too, if anybody keeps an account."""
    before = getattr(_thread, "tracker", None)
    if not _accounts:
        yield
    elif before and before.account is _accounts[-1]:  # the thread is tracked: one tracker is enough
        device, before.device = before.device, device
        try:
            yield
        finally:
            before.device = device
    else:
        _thread.tracker = AllocationTracker(_accounts[-1], device)
        try:
            with _thread.tracker:
                yield
        finally:
            _thread.tracker = before


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies; `HOST` for one in CPU memory that nobody has put on a virtual device."""
    if tensor.device.type != "cpu" or not _accounts:
        return tensor.device
    holding = _accounts[-1].holdings.get(tensor.untyped_storage())
    return holding.device if holding else HOST


@contextlib.contextmanager
def record_move(part: str, target: torch.device, *tensors: torch.Tensor) -> Iterator[None]:
    """Record that `part` of the step copies `tensors` to `target`; what operations make meanwhile lies there."""
    moved = [(device, each) for each in tensors if (device := device_of(each)) != target]
    if _accounts:
        _accounts[-1].moves.extend(Move(part, device, target, each.nbytes) for device, each in moved)
    _thread.move = target, MOVED_LABELS.get(part)
    try:
        with device_work.moving(part, moved, target):
            yield
    finally:
        _thread.move = None


def label_buckets(ddp: DistributedDataParallel, account: Account) -> None:
    """Have `account` count the buckets of `ddp` as gradients, where DDP makes them anew: in its second forward.

    (Those of the first step it makes when it is made itself: do that in `with account.labelled("gradients")`.)
    """
    label = account.label

    def before_ddp(*_: object) -> None:
        nonlocal label
        label, account.label = account.label, "gradients"

    def before_model(*_: object) -> None:
        account.label = label

    ddp.register_forward_pre_hook(before_ddp)
    ddp.module.register_forward_pre_hook(before_model)
