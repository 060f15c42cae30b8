"""BatchNorm whose statistics are those of the global batch, whichever ranks its samples are on.

torch's own (`torch.nn.SyncBatchNorm`) does the same, on GPUs only; this one runs wherever
`dist.all_reduce` does. Source:
https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html and Ioffe and Szegedy,
2015, arXiv 1502.03167
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class AllReduceSum(torch.autograd.Function):
    """The sum of every rank's tensor, through which gradients flow. All ranks must call it, and its
    backward.

    Every rank goes on with this sum, so every rank's loss depends on every rank's tensor: the
    gradient of a tensor is the sum, over all ranks, of the gradients of their losses with respect
    to the sum. (It is divided by the number of ranks when all gradients are averaged.)
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return AllReduceSum.apply(gradient)


class SyncBatchNorm(nn.BatchNorm2d):
    """[samples, channels, height, width] → the same shape, normalised by the mean and variance of
    all ranks' samples. Ranks may have different numbers of samples, or none. In eval mode it is
    BatchNorm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        local_count = input.new_tensor([input.numel() / input.size(1)])
        totals = AllReduceSum.apply(torch.cat([input.sum((0, 2, 3)), local_count]))
        mean, count = totals[:-1] / totals[-1], totals[-1]
        # Not E[x²] - E[x]²: where the mean is large, that subtracts two large numbers, and only
        # rounding is left.
        deviations = input - mean.view(-1, 1, 1)
        variance = AllReduceSum.apply(deviations.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (variance * count / (count - 1) - self.running_var)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return deviations * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm2d in `model` normalise over all ranks, as
    `torch.nn.SyncBatchNorm.convert_sync_batchnorm` does. Returns `model`."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = SyncBatchNorm
    return model
