"""What makes a training need less memory, for any module: activations computed again."""

from __future__ import annotations

import torch
from torch import nn

from playground.training.activations import Checkpoint


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


def recompute(module: nn.Module) -> None:
    """Let the forward of a module be that of `Recomputed`, around its own."""
    module.__class__ = type("Recomputed", (Recomputed, type(module)), {})
