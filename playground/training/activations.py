"""What autograd keeps for backward, counted in bytes, now and at most; and a block that keeps only
its input and computes the rest again.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn


class Activations(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward in this block: `held` now, `peak` at most.

    Memory that several operations keep counts once, and the parameters' not at all.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self.pack, lambda saved: saved.tensor)
        self.own = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self.uses: Counter[int] = Counter()
        self.held = 0
        self.peak = 0

    def __enter__(self) -> Activations:
        super().__enter__()
        return self

    def pack(self, tensor: Tensor) -> Saved:
        self.count(tensor.untyped_storage(), 1)
        return Saved(tensor, self)

    def count(self, storage: torch.UntypedStorage, change: int) -> None:
        before = self.uses[storage.data_ptr()]
        self.uses[storage.data_ptr()] += change
        if storage.data_ptr() not in self.own and 0 in (before, before + change):
            self.held += change * storage.nbytes()
            self.peak = max(self.peak, self.held)


class Saved:
    """A tensor that autograd keeps, until backward has used it."""

    def __init__(self, tensor: Tensor, activations: Activations) -> None:
        self.tensor = tensor
        self.activations = activations

    def __del__(self) -> None:
        self.activations.count(self.tensor.untyped_storage(), -1)


class Checkpoint(torch.autograd.Function):
    """`Checkpoint.apply(block, x)` runs a block of one input and keeps only this input. Backward
    runs the block a second time.

    Dropout must drop the same elements in both runs, so the state of the random numbers is kept,
    too. The state of autocast is not.
    """

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.random = torch.cuda if x.is_cuda else torch
        ctx.state = ctx.random.get_rng_state()
        ctx.save_for_backward(x)
        output: Tensor = block(x)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            ctx.random.set_rng_state(ctx.state)
            output = ctx.block(x)
        output.backward(grad)  # adds to the gradients of the block's parameters
        return None, x.grad
