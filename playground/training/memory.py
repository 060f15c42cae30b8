"""What makes a training need less memory, for any module: forward in bfloat16, and activations
computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from playground.training.activations import Activations, Checkpoint
from playground.world import device


class InBfloat16(nn.Module):
    """The operations of forward that autocast knows compute in bfloat16. Parameters and the output
    are float32."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        with torch.autocast(device().type, torch.bfloat16):
            return super().forward(*inputs).float()


class Recomputed(nn.Module):
    """Keeps its first input alone for backward, which must need a gradient; the others must not."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        def forward(x: torch.Tensor) -> torch.Tensor:
            # a cached cast of `x`, a leaf in backward, would add up its gradients in bfloat16
            with torch.autocast(
                x.device.type, torch.bfloat16, enabled=is_autocast, cache_enabled=False
            ):
                return run(x, *others)

        is_autocast = torch.is_autocast_enabled(x.device.type)
        run = super().forward
        return Checkpoint.apply(forward, x)


def change(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let the forward of a module be that of `kind`, `InBfloat16` or `Recomputed`, around its
    own."""
    module.__class__ = type(kind.__name__, (kind, type(module)), {})


def bytes_kept(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """The bytes that autograd keeps for backward of `forward`, which runs the model. The next
    random numbers stay the same."""
    with torch.random.fork_rng(), Activations(model) as activations:
        output = forward()
        held = activations.held
    del output  # and with it what is kept
    return held
