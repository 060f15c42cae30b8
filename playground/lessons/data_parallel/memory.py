"""The memory of each device, and the copies between devices: an account of what tensors hold.

For torch all of `cpu:0 … cpu:3` is one CPU. In a `with track_memory(devices) as account:` they are
told apart as GPUs are: the result of an operation lies where its operands lie, and only a copy
takes it elsewhere; an operation on tensors of two devices is an error. The bytes of a storage count
from when an operation returns it until the last tensor that uses it is gone. Temporary memory of an
operation does not count, nor what libraries keep.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from playground.lessons.data_parallel.machine import HOST, tensors_in
from playground.lessons.data_parallel.page import LABELS
from playground.training.device_work import DeviceObserver, Moved, device_of, observing

NEXT_LABEL = {"forward": "gradients", "synced": "optimizer state", "step": "activations"}
"""Label of tensors made after each moment of a training step
(`playground.training.step.Moment`)."""
MOVED_LABELS = {
    "scatter": "inputs", "loss": "inputs", "targets": "inputs", "gradients of inputs": "gradients",
    "replicate": "parameters", "reduce": "gradients",
    "gather": "gathered outputs", "gradients of outputs": "gradients",
}  # fmt: skip
"""Labels of the copies that each part of a step makes; copies of other parts have the label of the
step's phase."""
_thread = threading.local()  # tracker: of this thread; move: (target, label) while it copies


class Account(DeviceObserver):
    """The bytes `moved` by (part of the step, source, target), and per device those held now and at
    most, by label.

    The labels are those of `LABELS`: the caller's, for what it puts on the account; for a tensor
    that moves, that of the part of the step that moves it; for everything else that of the phase of
    the step, `label`: forward makes activations, backward gradients (of activations too), the
    optimizer its state. Hand `moment` to `training_step`, so that the account hears of the phases.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.label = "activations"
        self.busy = defaultdict[torch.device, float](float)
        """Seconds in which each device's operations computed, without copies and without waiting
        for a core or the GIL; of a GPU, in which they were launched."""
        self.moved: Counter[tuple[str, torch.device, torch.device]] = Counter()
        self.holdings: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        """[device, label, bytes] of each storage that is alive."""
        self.lock = threading.RLock()
        self.released: deque[list[Any]] = deque()  # filled by the garbage collector, at any moment
        self._held: dict[torch.device, Counter[str]] = {device: Counter() for device in devices}
        self._at_peak: dict[torch.device, Counter[str]] = {device: Counter() for device in devices}

    def put(self, *tensors: torch.Tensor, device: torch.device, label: str | None = None) -> None:
        """Count these on `device`, or on the GPU where they lie, unless they are counted already;
        under `label`, even if they are. Without a label they count under that of the phase of the
        step."""
        with self.lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                place = tensor.device if tensor.is_cuda else device
                if place == HOST:
                    continue
                if known := self.holdings.get(storage):
                    there, before, nbytes = known
                    self._held[there].update({before: -nbytes})
                    self._held[there].update({label or before: nbytes})
                    known[1] = label or before
                    continue
                self.holdings[storage] = holding = [place, label or self.label, storage.nbytes()]
                weakref.finalize(storage, self.released.append, holding).atexit = False
                held = self.count_held().setdefault(place, Counter())
                held[holding[1]] += holding[2]
                if held.total() > self._at_peak.setdefault(place, Counter()).total():
                    self._at_peak[place] = held.copy()

    def count_held(self) -> dict[torch.device, Counter[str]]:
        """The bytes that each device holds, by label, without what has been released."""
        while self.released:
            device, label, nbytes = self.released.popleft()
            self._held[device][label] -= nbytes
        return self._held

    def put_module(self, module: nn.Module, device: torch.device) -> None:
        """Count its parameters and buffers on `device`, and the gradients that it has already."""
        self.put(*module.parameters(), *module.buffers(), device=device, label="parameters")
        grads = (parameter.grad for parameter in module.parameters())
        self.put(*(grad for grad in grads if grad is not None), device=device, label="gradients")

    def put_state(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Count the state that `optimizer` has already. Single numbers do not count: they stay in
        the host's memory."""
        values = (value for state in optimizer.state.values() for value in state.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
        self.put(*tensors, device=device, label="optimizer state")

    def moment(self, name: str) -> None:
        """A moment of the training step is over: what is made from now on has the label of the
        next."""
        self.label = NEXT_LABEL[name]

    def labelled(self, label: str) -> contextlib.AbstractContextManager[None]:
        """Tensors made meanwhile, except copies to other devices, have this label."""
        return temporarily(self, label=label)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor in CPU memory was put."""
        device: torch.device = self.holdings.get(tensor.untyped_storage(), [HOST])[0]
        return device

    def moving(
        self, part: str, moved: Moved, target: torch.device
    ) -> contextlib.AbstractContextManager[None]:
        """Record the copies; what operations make meanwhile lies on `target`."""
        for source, each in moved:
            self.moved[part, source, target] += each.nbytes
        return temporarily(_thread, move=(target, MOVED_LABELS.get(part)))

    @contextlib.contextmanager
    def working_for(self, device: torch.device) -> Iterator[None]:
        """Have this thread, which works for `device` meanwhile, counted too."""
        before = getattr(_thread, "tracker", None)
        if before and before.account is self:  # the thread is tracked: one tracker is enough
            with temporarily(before, device=device):
                yield
        else:
            with temporarily(_thread, tracker=AllocationTracker(self, device)), _thread.tracker:
                yield

    @property
    def held(self) -> dict[torch.device, int]:
        """Bytes that each device holds now."""
        return {device: sum(labels.values()) for device, labels in self.held_by_label.items()}

    @property
    def held_by_label(self) -> dict[torch.device, dict[str, int]]:
        """The same by label; of those that there are."""
        with self.lock:
            return {device: by_label(held) for device, held in self.count_held().items()}

    @property
    def peak(self) -> dict[torch.device, int]:
        """The most bytes that each device has held at any moment."""
        return {device: sum(labels.values()) for device, labels in self.at_peak.items()}

    @property
    def at_peak(self) -> dict[torch.device, dict[str, int]]:
        """Bytes that each device held at that moment (the first, if there were several), by
        label."""
        return {device: by_label(held) for device, held in self._at_peak.items()}


@contextlib.contextmanager
def temporarily(owner: object, **values: object) -> Iterator[None]:
    """In this block the attributes have these values, afterwards again those before; None if they
    had none."""
    before = {name: getattr(owner, name, None) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


def by_label(held: Counter[str]) -> dict[str, int]:
    """In the order of `LABELS`, without those of which there is nothing."""
    return {label: held[label] for label in LABELS if held[label]}


class AllocationTracker(TorchDispatchMode):
    """Sees every operation of its thread, backward's too, and puts what it makes on the account.
    What has no operands is made on `device`."""

    def __init__(self, account: Account, device: torch.device) -> None:
        super().__init__()
        self.account = account
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds, move = time.thread_time() - start, getattr(_thread, "move", None)
        device, label = move or (self.common_device(func, args, kwargs), None)
        self.account.put(*tensors_in(result), device=device, label=label)
        if not move:
            with self.account.lock:
                self.account.busy[device] += seconds
        return result

    def common_device(self, func: Any, *operands: Any) -> torch.device:
        """Where all operands lie. Raises `RuntimeError` if they do not lie together (one number
        may, as in torch)."""
        tensors = tensors_in(operands)
        devices = {device_of(tensor) for tensor in tensors if tensor.dim()} - {HOST}
        devices = devices or {device_of(tensor) for tensor in tensors} - {HOST}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise RuntimeError(f"{func}: operands on {names}: copy them to one device")
        return devices.pop() if devices else self.device


@contextlib.contextmanager
def track_memory(
    devices: Sequence[torch.device], default: torch.device = HOST
) -> Iterator[Account]:
    """Keep an account of `devices` in this block. It slows every operation down: do not time
    anything in it. `default` is where what has no operands is made: in a rank, all of whose work is
    one device's, that device."""
    account = Account(devices)
    with observing(account), account.working_for(default):
        yield account


def label_buckets(ddp: DistributedDataParallel, account: Account) -> None:
    """Have `account` count the buckets of `ddp` as gradients, where DDP rebuilds them: in its
    second forward. (Those of the first step it makes when it is made itself: do that in `with
    account.labelled("gradients")`.)"""
    for module, label in ((ddp, "gradients"), (ddp.module, "activations")):
        module.register_forward_pre_hook(lambda *_, label=label: setattr(account, "label", label))
