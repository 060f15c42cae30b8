"""How many bytes autograd keeps for backward."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class ActivationCounter(saved_tensors_hooks):
    """As a context manager: counts the bytes of what forward passes save for backward, parameters
    left out. Several operations may save the same memory: it counts once, and until the last of
    them lets go of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self.pack, lambda saved: saved)
        self.parameters = {param.data_ptr() for param in model.parameters()}
        self.holders: Counter[int] = Counter()
        self.nbytes = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called by autograd for each tensor it saves. What it returns lives as long as the graph
        needs it."""
        saved = tensor.detach()
        place = tensor.data_ptr()
        if place not in self.parameters:
            self.nbytes += 0 if self.holders[place] else tensor.nbytes
            self.holders[place] += 1
            self.peak = max(self.peak, self.nbytes)
            weakref.finalize(saved, self.free, place, tensor.nbytes)
        return saved

    def free(self, place: int, nbytes: int) -> None:
        """One holder of the memory at `place` is gone."""
        self.holders[place] -= 1
        self.nbytes -= 0 if self.holders[place] else nbytes
