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
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        how = kwargs or {}
        generator = how.get("generator")
        if generator is None:
            return func(*args, **how)
        place, device = generator.device, how.get("device")
        if device is not None and torch.device(device).type != place.type:
            drawn = func(*args, **{**how, "device": place})
            return drawn.detach().to(device).requires_grad_(drawn.requires_grad)
        target = args[0] if args else None
        is_filled = isinstance(target, torch.Tensor) and func.__name__.endswith("_")
        if is_filled and target.device.type != place.type:
            return target.copy_(func(torch.empty_like(target, device=place), *args[1:], **how))
        return func(*args, **how)


def set_default_device(device: torch.device) -> None:
    """From now on, this thread creates its tensors on `device`, unless it names another one. A
    process that it forks, such as a worker of a DataLoader, creates them on the CPU: no fork can
    use the GPU of its parent."""
    DrawWhereTheGeneratorIs().__enter__()
    torch.set_default_device(device)
    os.register_at_fork(after_in_child=lambda: torch.set_default_device(None))
