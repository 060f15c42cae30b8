"""The account of what devices hold: which storages, of what kind, and what was copied between devices.

It only counts what it is told of: `memory.py` tells it what operations make.
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

from playground.lessons.data_parallel.results import LABELS

HOST = torch.device("cpu")
"""Memory of no device: where batches come from."""
NEXT_LABEL = {"forward": "gradients", "synced": "optimizer state", "step": "activations"}
"""What operations make after each moment of a training step (`playground.training.step.Moment`)."""


@dataclass(frozen=True)
class Move:
    """A tensor of `bytes` bytes that `part` of the step has copied."""

    part: str
    source: torch.device
    target: torch.device
    bytes: int


@dataclass
class Holding:
    """A storage that is alive."""

    device: torch.device
    label: str
    bytes: int


class Account:
    """Of virtual devices: `moves` in order, and per device the bytes it holds and has held at most, by label.

    The labels are those of `LABELS`. What the caller puts on the account is labelled by the caller; what moves between
    devices, by the part of the step that moves it; everything else by the phase of the step, `label`: what forward
    makes are activations, what backward makes gradients (of activations too), what the optimizer makes is its state
    (and what it needs to compute it). Hand `moment` to `training_step`, so that the account hears of the phases.
    """

    def __init__(self, devices: Sequence[torch.device], timed: bool = False) -> None:
        self.timed = timed
        self.moves: list[Move] = []
        self.snapshots: dict[str, dict[torch.device, int]] = {}
        self.label = "activations"
        self.busy = dict.fromkeys(devices, 0.0)
        """Seconds in which operations computed, if they are `timed`."""
        self.holdings: weakref.WeakKeyDictionary[Any, Holding] = weakref.WeakKeyDictionary()
        """By storage."""
        self.lock = threading.RLock()
        self.released: deque[Holding] = deque()  # filled by the garbage collector, at any moment
        self._held: dict[torch.device, Counter[str]] = {device: Counter() for device in devices}
        self._at_peak: dict[torch.device, Counter[str]] = {device: Counter() for device in devices}

    def put(self, *tensors: torch.Tensor, device: torch.device, label: str | None = None) -> None:
        """Count these on `device`, unless they are counted already; under `label`, even if they are.

        Without a label they count under that of the phase of the step.
        """
        with self.lock:
            for storage in (tensor.untyped_storage() for tensor in tensors):
                holding = self.holdings.get(storage)
                if holding is None:
                    self.add(storage, Holding(device, label or self.label, storage.nbytes()))
                elif label and label != holding.label:
                    self._held[holding.device].update({holding.label: -holding.bytes, label: holding.bytes})
                    holding.label = label

    def add(self, storage: Any, holding: Holding) -> None:
        """Count one more storage, and see whether its device has ever held as much."""
        self.holdings[storage] = holding
        weakref.finalize(storage, self.released.append, holding).atexit = False
        self.subtract_released()
        held = self._held.setdefault(holding.device, Counter())
        held[holding.label] += holding.bytes
        if held.total() > self._at_peak.setdefault(holding.device, Counter()).total():
            self._at_peak[holding.device] = held.copy()

    def subtract_released(self) -> None:
        while self.released:
            holding = self.released.popleft()
            self._held[holding.device][holding.label] -= holding.bytes

    def add_busy(self, device: torch.device, seconds: float) -> None:
        """Count the time of an operation that ran on `device`."""
        with self.lock:
            self.busy[device] = self.busy.get(device, 0.0) + seconds

    def put_module(self, module: nn.Module, device: torch.device) -> None:
        """Count its parameters and buffers on `device`, and the gradients that it has already."""
        self.put(*module.parameters(), *module.buffers(), device=device, label="parameters")
        grads = (parameter.grad for parameter in module.parameters())
        self.put(*(grad for grad in grads if grad is not None), device=device, label="gradients")

    def put_state(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Count the state that `optimizer` has already. Single numbers do not count: they stay in the host's memory."""
        values = (value for state in optimizer.state.values() for value in state.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
        self.put(*tensors, device=device, label="optimizer state")

    def moment(self, name: str) -> None:
        """A moment of the training step is over: what is made from now on has the label of the next."""
        self.label = NEXT_LABEL[name]

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """What is made meanwhile, and is no copy to another device, has this label."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    @property
    def held(self) -> dict[torch.device, int]:
        """Bytes that each device holds now."""
        return {device: sum(labels.values()) for device, labels in self.held_by_label.items()}

    @property
    def held_by_label(self) -> dict[torch.device, dict[str, int]]:
        """The same by label; of those that there are."""
        with self.lock:
            self.subtract_released()
            return {device: by_label(held) for device, held in self._held.items()}

    @property
    def peak(self) -> dict[torch.device, int]:
        """The most bytes that each device has held at any moment."""
        return {device: sum(labels.values()) for device, labels in self.at_peak.items()}

    @property
    def at_peak(self) -> dict[torch.device, dict[str, int]]:
        """What each device held at that moment (the first, if there were several), by label."""
        return {device: by_label(held) for device, held in self._at_peak.items()}

    def reset_peak(self) -> None:
        """Forget what was held at most: `peak` starts again from what is held now."""
        with self.lock:
            self.subtract_released()
            self._at_peak = {device: held.copy() for device, held in self._held.items()}

    def snapshot(self, name: str) -> None:
        """Keep what is held now in `snapshots`, under that name."""
        self.snapshots[name] = self.held

    def bytes_moved(self) -> Counter[tuple[str, torch.device, torch.device]]:
        """The bytes of all moves, by (part, source, target)."""
        total: Counter[tuple[str, torch.device, torch.device]] = Counter()
        for move in self.moves:
            total[move.part, move.source, move.target] += move.bytes
        return total


def by_label(held: Counter[str]) -> dict[str, int]:
    """In the order of `LABELS`, without those of which there is nothing."""
    return {label: held[label] for label in LABELS if held[label]}
