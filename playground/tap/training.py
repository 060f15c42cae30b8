"""What a training program does besides calling operations: models, samples, batches, files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from playground.base.upstream import batch_iterator
from playground.tap.observer import Observer
from playground.tap.replacement import Replacement, calling

OUTSIDE = "Running {} on global rank {} which does not belong to the given group."
"""torch's own warning, which names the line that calls its function: that would be ours."""


class Training:
    """Tells observers that look at training."""

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()
        stand_ins: dict[tuple[Any, str], Callable[..., Any]] = {
            (DistributedDataParallel, "__init__"): self.wrap_model,
            (DistributedDataParallel, "forward"): self.call_model,
            (nn.Module, "load_state_dict"): self.load_model,
            (DistributedSampler, "__iter__"): self.draw_samples,
            (batch_iterator(), "__next__"): self.load_batch,
            (torch, "save"): self.save_file,
            (torch, "load"): self.load_file,
            (distributed_c10d, "_warn_not_in_group"): self.warn_from_outside,
        }
        self.replacements = [
            Replacement(*place, calling(each)) for place, each in stand_ins.items()
        ]

    def wrap_model(self, real: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
        real(model, *args, **kwargs)
        for each in self.observers:
            each.model_wrapped(model)

    def call_model(self, real: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for each in self.observers:
                each.model_called(model, (*args, *kwargs.values()))
        return real(model, *args, **kwargs)

    def load_model(self, real: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(module, *args, **kwargs)
        for each in self.observers:
            each.model_loaded(module)
        return result

    def draw_samples(self, real: Callable[..., Any], sampler: Any) -> Any:
        for each in self.observers:
            each.samples_drawn(sampler)
        return real(sampler)

    def load_batch(self, real: Callable[..., Any], iterator: Any) -> Any:
        batch = real(iterator)
        for each in self.observers:
            each.batch_loaded(iterator, batch)
        return batch

    def warn_from_outside(self, real: Callable[..., Any], operation: str) -> None:
        for each in self.observers:
            each.called_from_outside(operation)
        warnings.warn(OUTSIDE.format(operation, torch.distributed.get_rank()), stacklevel=3)

    def save_file(
        self, real: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any
    ) -> None:
        real(obj, f, *args, **kwargs)
        for each in self.observers:
            each.file_saved(f, obj)

    def load_file(self, real: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        for each in self.observers:
            each.file_loaded(f)
        return real(f, *args, **kwargs)
