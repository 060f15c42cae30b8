"""What each device holds, and what moves between devices: real for GPUs, an account kept here for virtual ones.

For torch all of `cpu:0 … cpu:3` is one CPU. In a `with track_memory(devices) as account:` they are told apart as GPUs
are: the result of an operation lies where its operands lie, and only a copy takes it elsewhere; an operation on tensors
of two devices is an error. The bytes of a storage count from when an operation returns it until the last tensor that
uses it is gone: parameters and their copies, inputs, outputs, activations saved for backward, gradients, the
optimizer's state. What an operation needs only while it runs does not count.

On GPUs the account is that of torch's allocator (`torch.cuda.max_memory_allocated`), for the whole process.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = torch.device("cpu")
"""Memory of no device: where batches come from."""


@dataclass(frozen=True)
class Move:
    """A tensor of `bytes` bytes that `part` of the step has copied."""

    part: str
    source: torch.device
    target: torch.device
    bytes: int


class Account:
    """Of virtual devices: `moves` in order, `held` and `peak` in bytes per device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.moves: list[Move] = []
        self.snapshots: dict[str, dict[torch.device, int]] = {}
        self.device_of: weakref.WeakKeyDictionary[Any, torch.device] = weakref.WeakKeyDictionary()
        """Where each storage lies."""
        self.lock = threading.RLock()
        self.released: deque[tuple[torch.device, int]] = deque()  # filled by the garbage collector, at any moment
        self._held = dict.fromkeys(devices, 0)
        self._peak = dict.fromkeys(devices, 0)

    def put(self, *tensors: torch.Tensor, device: torch.device) -> None:
        """Count these on `device`, unless they are counted already."""
        with self.lock:
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage not in self.device_of:
                    self.device_of[storage] = device
                    weakref.finalize(storage, self.released.append, (device, storage.nbytes())).atexit = False
                    self._held[device] = self.held.get(device, 0) + storage.nbytes()
                    self._peak[device] = max(self._peak.get(device, 0), self._held[device])

    def put_module(self, module: nn.Module, device: torch.device) -> None:
        """Count its parameters and buffers on `device`."""
        self.put(*module.parameters(), *module.buffers(), device=device)

    @property
    def held(self) -> dict[torch.device, int]:
        with self.lock:
            while self.released:
                device, freed = self.released.popleft()
                self._held[device] -= freed
            return dict(self._held)

    @property
    def peak(self) -> dict[torch.device, int]:
        return dict(self._peak)

    def snapshot(self, name: str) -> None:
        """Keep what is held now in `snapshots`, under that name."""
        self.snapshots[name] = self.held

    def bytes_moved(self) -> Counter[tuple[str, torch.device, torch.device]]:
        """The bytes of all moves, by (part, source, target)."""
        total: Counter[tuple[str, torch.device, torch.device]] = Counter()
        for move in self.moves:
            total[move.part, move.source, move.target] += move.bytes
        return total

    def track(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """In this thread, count what operations make; on `device` if they have no operands."""
        return AllocationTracker(self, device)


class AllocationTracker(TorchDispatchMode):
    """Sees every operation of its thread, backward's too, and puts what it makes on the account."""

    def __init__(self, account: Account, device: torch.device) -> None:
        super().__init__()
        self.account, self.device = account, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        device = getattr(_move, "target", None) or self.common_device(func, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if device != HOST:
            self.account.put(*made, device=device)
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
    """Of GPUs: moves are recorded as everywhere, the bytes are what the allocator says."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def held(self) -> dict[torch.device, int]:
        return {device: torch.cuda.memory_allocated(device) for device in self._held}

    @property
    def peak(self) -> dict[torch.device, int]:
        return {device: torch.cuda.max_memory_allocated(device) for device in self._held}

    def put(self, *tensors: torch.Tensor, device: torch.device) -> None:
        pass

    def track(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


_accounts: list[Account] = []
_move = threading.local()


@contextlib.contextmanager
def track_memory(devices: Sequence[torch.device]) -> Iterator[Account]:
    """Keep an account of `devices` meanwhile. It slows every operation down: do not time anything in it."""
    account = (GpuAccount if devices[0].type == "cuda" else Account)(devices)
    _accounts.append(account)
    try:
        with account.track(HOST):
            yield account
    finally:
        _accounts.remove(account)


def track_thread(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Have this thread, which works for `device`, counted too, if anybody keeps an account."""
    return _accounts[-1].track(device) if _accounts else contextlib.nullcontext()


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies; `HOST` for one in CPU memory that nobody has put on a virtual device."""
    if tensor.device.type != "cpu" or not _accounts:
        return tensor.device
    return _accounts[-1].device_of.get(tensor.untyped_storage(), HOST)


@contextlib.contextmanager
def record_move(part: str, target: torch.device, *tensors: torch.Tensor) -> Iterator[None]:
    """Record that `part` of the step copies `tensors` to `target`; what operations make meanwhile lies there."""
    if _accounts:
        moves = [Move(part, device_of(each), target, each.nbytes) for each in tensors if device_of(each) != target]
        _accounts[-1].moves.extend(moves)
    _move.target = target
    try:
        yield
    finally:
        _move.target = None
