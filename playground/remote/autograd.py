"""Distributed autograd: a graph that spans ranks, by remote references.

    output = apply_remotely(agent, 1, function, input)
    output.sum().backward()      # goes on through the function on rank 1, and comes back with the input's gradient

The part of the graph that belongs to a remote call stays where it was computed, and the caller's part holds a reference
to it. Backward sends the gradient of the output there and receives those of the inputs, where forward sent the inputs
and received the output. What the function uses on its own rank, parameters say, finds its gradient in `.grad` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from playground.remote.agent import Agent


def apply_remotely(agent: Agent, rank: int, function: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """The tensor that `function(*inputs)` returns on that rank, as part of a graph that reaches there."""
    always = torch.empty(0, requires_grad=True)  # also where no input has a gradient, the function's parameters do
    return SendAndReceive.apply(agent, rank, function, always, *inputs)


class RemoteGraph:
    """The part of a graph that was computed here for a caller elsewhere. It goes when the caller's part goes."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        self.inputs = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        with torch.enable_grad():
            self.output = function(*self.inputs)

    def value(self) -> torch.Tensor:
        return self.output.detach()

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Go on with the backward pass here. Returns the inputs' gradients."""
        self.output.backward(gradient)
        return [tensor.grad for tensor in self.inputs]


class SendAndReceive(torch.autograd.Function):
    """The caller's part: forward sends the inputs and receives the output, backward does so with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, agent: Agent, rank: int, function: Callable[..., Any], always: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.graph = agent.remote(rank, RemoteGraph, function, inputs)
        return ctx.graph.call("value")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, None, *ctx.graph.call("backward", gradient)
