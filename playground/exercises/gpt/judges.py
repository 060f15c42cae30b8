"""Judge of the exercise on the parts of a GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from playground.exercises.cases import Cases, predict
from playground.training.activations import Activations
from playground.ui.units import plural


class GatedMLP(nn.Module):
    """The MLP of Llama. Source: Shazeer, GLU Variants Improve Transformer, 2020, arXiv
    2002.05202."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(channels, inner, bias=False)
        self.up = nn.Linear(channels, inner, bias=False)
        self.down = nn.Linear(inner, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


def gated_mlp(rank: int, size: int, seed: int) -> Cases:
    """What autograd and torch's counter count of the module."""
    for tokens, channels, inner in ((6, 8, 20), (5, 12, 32)):
        mlp = GatedMLP(channels, inner)
        x = torch.ones(tokens, channels, requires_grad=True)
        with Activations(mlp) as activations, FlopCounterMode(display=False) as counter:
            output = mlp(x)
            kept = activations.held // x.itemsize
            output.sum().backward()
        counted = {
            "parameters": sum(param.numel() for param in mlp.parameters()),
            "kept": kept,
            "operations": counter.get_total_flops(),
        }
        about = f"{plural(tokens, 'token')}, {channels} → {inner} → {channels}"
        yield predict(about, (tokens, channels, inner), counted)
