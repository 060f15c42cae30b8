"""The device on which a program creates its tensors, in whatever it calls as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DrawWhereTheGeneratorIs(TorchFunctionMode):
    """A tensor that is drawn from a generator is drawn where that generator is, and then moved.

    torch refuses a generator of the CPU for a tensor on a GPU. A `DataLoader` that shuffles has
    such a generator, and so have samplers and `random_split`: without this, they raise as soon as
    the default device is a GPU. The numbers are the same on every device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        how = kwargs or {}
        generator = how.get("generator")
        if generator is None:
            return func(*args, **how)
        place = generator.device
        given = next((each for each in args if isinstance(each, torch.Tensor)), None)
        if given is None:  # a new tensor
            device = torch.device(how.get("device") or torch.get_default_device())
            if device.type == place.type:
                return func(*args, **how)
            drawn = func(*args, **{**how, "device": place})
            return drawn.detach().to(device).requires_grad_(drawn.requires_grad)
        if given.device.type == place.type:
            return func(*args, **how)
        moved = (each.to(place) if isinstance(each, torch.Tensor) else each for each in args)
        drawn = func(*moved, **how)
        return given.copy_(drawn) if func.__name__.endswith("_") else drawn.to(given.device)


def set_default_device(device: torch.device) -> None:
    """From now on, this thread creates its tensors on `device`, unless it names another one. A
    process that it forks, such as a worker of a DataLoader, creates them on the CPU: no fork can
    use the GPU of its parent."""
    torch.set_default_device(device)
    DrawWhereTheGeneratorIs().__enter__()
    os.register_at_fork(after_in_child=lambda: torch.set_default_device(None))
