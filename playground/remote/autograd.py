"""Distributed autograd: a graph that spans ranks, by remote references.

    output = apply_remotely(agent, 1, function, input)
    output.sum().backward()      # runs the backward on rank 1, too, and returns the input's gradient

The part of the graph inside a remote call stays where it was computed, and the caller's part holds a reference to it.
Gradients of tensors on the other rank, such as parameters, are accumulated in their `.grad` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from playground.remote.agent import Agent


def apply_remotely(agent: Agent, rank: int, function: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """Run `function(*inputs)` on that rank. Returns its tensor, as part of a graph that extends to there."""
    always = torch.empty(0, requires_grad=True, device="cpu")  # even if no input needs a gradient, the parameters do
    return SendAndReceive.apply(agent, rank, function, always, *inputs)


class RemoteGraph:
    """The part of a graph that was computed here for a remote caller. It lives as long as the caller's part."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        differentiable = (tensor.is_floating_point() or tensor.is_complex() for tensor in inputs)
        # a tensor that is passed twice arrives as one: each place has a gradient of its own, and the caller adds them
        self.inputs = [
            tensor.detach().requires_grad_(each) for tensor, each in zip(inputs, differentiable, strict=True)
        ]
        with torch.enable_grad():
            self.output = function(*self.inputs)

    def value(self) -> torch.Tensor:
        return self.output.detach()

    def backward(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Run the backward pass here. Returns the inputs' gradients, each time afresh."""
        for tensor in self.inputs:
            tensor.grad = None
        self.output.backward(gradient, retain_graph=True)  # the caller may ask again
        return [tensor.grad for tensor in self.inputs]


class SendAndReceive(torch.autograd.Function):
    """The caller's part: forward sends inputs and receives the output, backward does the same with gradients."""

    @staticmethod
    def forward(
        ctx: Any, agent: Agent, rank: int, function: Callable[..., Any], always: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.graph = agent.remote(rank, RemoteGraph, function, inputs)
        return ctx.graph.call("value")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, None, *ctx.graph.call("backward", gradient)
