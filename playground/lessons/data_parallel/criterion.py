"""The loss in parallel: three ways not to gather large outputs, and the mean that is right for unequal chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from playground.lessons.data_parallel.devices import Device, resolve_devices, resolve_output_device
from playground.lessons.data_parallel.gather import gather
from playground.lessons.data_parallel.module import DataParallel, run_replicas
from playground.lessons.data_parallel.parallel_apply import parallel_apply
from playground.lessons.data_parallel.replicate import replicate
from playground.lessons.data_parallel.scatter import scatter
from playground.runtime.errors import UsageError


class LossModel(nn.Module):
    """A model and its criterion as one module: (inputs, targets) → loss. In DataParallel only losses are gathered."""

    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.model(inputs), targets)


class DataParallelModel(DataParallel):
    """DataParallel that gathers nothing: forward gives a list, each replica's output where it was made.

    Idea: https://hangzhang.org/PyTorch-Encoding/parallel.html
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> list[Any]:
        return run_replicas(self.module, inputs, kwargs, self.devices, self.dim)


class DataParallelCriterion(nn.Module):
    """`criterion(output, target)` in parallel, on what `DataParallelModel` has left on the devices.

    The targets are cut as the inputs were. A criterion with `reduction` "mean" (taken for granted if it has none) must
    mean the average over samples that weigh the same: with class weights or ignored targets, take "sum" and divide.

    Raises `UsageError` for targets that make another number of chunks than there are outputs.
    """

    def __init__(
        self, criterion: nn.Module, devices: Sequence[Device], output_device: Device | None = None, dim: int = 0
    ) -> None:
        super().__init__()
        self.criterion, self.dim = criterion, dim
        self.devices = resolve_devices(devices)
        self.output_device = resolve_output_device(output_device, self.devices)

    def forward(self, outputs: list[Any], targets: torch.Tensor) -> torch.Tensor:
        chunks = scatter(targets, self.devices, self.dim)
        if len(chunks) != len(outputs):
            raise UsageError(f"targets in {len(chunks)} chunks for {len(outputs)} outputs: give both the same devices")
        used = self.devices[: len(chunks)]
        losses = gather(
            parallel_apply(replicate(self.criterion, used), list(zip(outputs, chunks, strict=True)), None, used),
            self.output_device, self.dim,
        )  # fmt: skip
        reduction = getattr(self.criterion, "reduction", "mean")
        if reduction == "mean":
            return weighted_mean(losses, [chunk.shape[self.dim] for chunk in chunks])
        return losses.sum() if reduction == "sum" else losses


def weighted_mean(losses: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The mean over all samples, from the mean over each chunk [chunks] and the chunks' sizes.

    The mean of the means is the same only if all chunks are of one size: in another, each sample of a small chunk
    weighs more than one of a large chunk.
    """
    weights = torch.tensor(sizes, dtype=losses.dtype, device=losses.device)
    return (losses.reshape(-1) * weights).sum() / weights.sum()
