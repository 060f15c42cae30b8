"""What a run of `data-parallel` depends on. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from playground.runtime.checks import check_at_least_one, check_choice
from playground.runtime.errors import UsageError

MAX_DEVICES, MAX_BATCH_SIZE = 64, 256
OPTIMIZERS = ("sgd", "adam")
"""Adam keeps two numbers for each parameter, SGD none."""
WAYS = ("logits", "loss", "outputs")
"""Ways to the loss, named after what the devices compute and, all but the last, send to one of them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to the loss."""

    gather: str
    """One of `WAYS`. "outputs" stay where they are: only their losses are gathered."""
    output_device: str
    """Where the loss ends up."""

    def __post_init__(self) -> None:
        check_choice("gather", self.gather, WAYS)


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """Raises `UsageError` for what cannot be run. (Whether the devices exist is for `resolve_devices` to say.)"""

    devices: tuple[str, ...]
    """As torch calls them: cpu:0, cpu:1, … or cuda:0, cuda:1, … The model lies on the first."""
    output_device: str
    """One of them, where `one_step` gathers."""
    ways: tuple[Way, ...] = ()
    """To be compared."""
    batch_size: int = 32
    """Samples in a step, on all devices together."""
    steps: int = 3
    """Steps that are timed."""
    optimizer: str = "sgd"
    """One of `OPTIMIZERS`."""
    seed: int = 1234

    def __post_init__(self) -> None:
        check_device_count(len(self.devices))
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(
                f"--devices {','.join(self.devices)}: a device named twice would count twice, name each once"
            )
        for device in (self.output_device, *(way.output_device for way in self.ways)):
            if device not in self.devices:
                raise UsageError(
                    f"output device {device} is none of the devices {', '.join(self.devices)}: choose one of them"
                )
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise UsageError(f"batch_size {self.batch_size}: it must be between 1 and {MAX_BATCH_SIZE}")
        check_at_least_one(self, "steps")
        check_choice("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return self.devices[0].partition(":")[0]

    @property
    def on_first_device(self) -> DataParallelSettings:
        """One step of the same training on the first device alone."""
        first = self.devices[0]
        alone = (Way(gather="logits", output_device=first),)
        return replace(self, devices=(first,), output_device=first, ways=alone, steps=1)


def check_device_count(count: float) -> None:
    """Raise `UsageError` for more devices than a host has threads and processes for."""
    if count > MAX_DEVICES:
        raise UsageError(f"--devices {count:g}: at most {MAX_DEVICES}, each has a thread and a process here")


def ways_to_compare(devices: tuple[str, ...], gather: str | None, output_device: str | None) -> tuple[Way, ...]:
    """The one way that is asked for or, if `gather` is None, the usual one and its three cures."""
    if gather:
        return (Way(gather=gather, output_device=output_device or devices[0]),)
    elsewhere = output_device or devices[min(1, len(devices) - 1)]
    places = [*((way, devices[0]) for way in WAYS), ("logits", elsewhere)]
    return tuple(Way(gather=way, output_device=device) for way, device in dict.fromkeys(places))
