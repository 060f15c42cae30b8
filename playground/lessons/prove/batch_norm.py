"""BatchNorm whose statistics are those of the global batch, whichever ranks its samples are on.

torch's own (`torch.nn.SyncBatchNorm`) does the same, on GPUs only; this one runs wherever `dist.all_reduce` does.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html and Ioffe and Szegedy, 2015,
arXiv 1502.03167
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class AllReduceSum(torch.autograd.Function):
    """The sum of every rank's tensor, through which gradients flow. All ranks must call it, and its backward.

    Every rank goes on with this sum, so every rank's loss depends on every rank's tensor: the gradient of a tensor is
    the sum, over all ranks, of the gradients of their losses with respect to the sum. (It is divided by the number of
    ranks when all gradients are averaged.)
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return AllReduceSum.apply(gradient)


class SyncBatchNorm(_BatchNorm):
    """[samples, channels, …] → the same shape, normalised by the mean and variance of all ranks' samples.

    Ranks may have different numbers of samples, or none. In eval mode it is BatchNorm. Raises `ValueError` if all ranks
    together have only one value per channel: then there is no variance.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected [samples, channels, ...], got {input.dim()} dimension(s)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        reduced = [dim for dim in range(input.dim()) if dim != 1]
        per_channel = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        local_count = values.new_tensor([values.numel() // values.size(1)])
        totals = AllReduceSum.apply(torch.cat([values.sum(reduced), local_count]))
        sums, count = totals[:-1], totals[-1]
        if count <= 1:
            raise ValueError(f"all ranks together have {int(count)} value(s) per channel: a variance needs two")
        mean = sums / count
        # Not E[x²] - E[x]²: where the mean is large, that subtracts two large numbers, and only rounding is left.
        deviations = values - mean.view(per_channel)
        variance = AllReduceSum.apply(deviations.square().sum(reduced)) / count
        if self.track_running_stats:  # move them towards those of this batch, as BatchNorm does
            self.num_batches_tracked += 1
            step = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            unbiased = (variance * count / (count - 1)).detach()
            self.running_mean += step * (mean.detach() - self.running_mean)
            self.running_var += step * (unbiased - self.running_var)
        normalised = deviations * torch.rsqrt(variance + self.eps).view(per_channel)
        if self.affine:
            normalised = normalised * self.weight.view(per_channel) + self.bias.view(per_channel)
        return normalised.to(input.dtype)


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm in `model` normalise over all ranks. Returns `model`.

    Unlike with `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, a layer remains the same object, with its parameters,
    buffers and hooks; only its class changes.
    """
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.__class__ = SyncBatchNorm
    return model
