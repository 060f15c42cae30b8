"""The parameter server that many have copied: the workers' forward passes run through the server's own parameters.

Every worker has the server compute part of its forward pass, so that its graph holds the server's parameters. Then one
worker's step changes them, in place, and the next worker's backward pass finds other values than its forward pass
used. With one worker nothing happens; with two it depends on who is faster. Here the order is fixed.
Source: https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html; what becomes of it:
pytorch/examples#780 and #856
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import nn

from playground.lessons.parameter_server.page import SERVER, MistakeResult
from playground.remote.agent import Agent
from playground.remote.autograd import apply_remotely
from playground.training.net import Net

SAMPLES = 4
IN_PLACE = re.compile(r"one of the variables needed for gradient computation .*? instead")
"""Autograd's message, without its advice on debugging."""
models: list[nn.Module] = []
"""On the server's rank, the model that all workers train."""


def repeat_the_mistake(agent: Any, workers: Any) -> MistakeResult | None:
    """All workers go forward through the server, the first one backward, and steps; then the others go backward.
    Returns what this worker met; None on the server."""
    models[:] = [Net().eval()]
    dist.barrier()
    met = None if agent.rank == SERVER else meet(agent, workers)
    dist.barrier()
    models.clear()
    return met


def meet(agent: Any, workers: Any) -> MistakeResult:
    """One worker's part."""
    worker, error = dist.get_rank(workers), ""
    read = agent.call(SERVER, version)
    with own_graph(agent) if isinstance(agent, Agent) else torch_graph(agent) as graph:
        loss = F.nll_loss(graph.compute(torch.ones(SAMPLES, 1, 28, 28)), torch.zeros(SAMPLES, dtype=torch.int64))
        dist.barrier(workers)
        found = agent.call(SERVER, version)
        if worker == 0:
            graph.backward(loss)
            graph.step()
        dist.barrier(workers)
        if worker > 0:
            found = agent.call(SERVER, version)
            try:
                graph.backward(loss)
            except RuntimeError as raised:
                told = IN_PLACE.search(str(raised))
                if not told:
                    raise
                error = told[0]
    return MistakeResult(worker=worker, version_read=read, version_found=found, error=error)


class Graph(NamedTuple):
    """A graph that reaches from a worker into the server's parameters."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], object]
    step: Callable[[], object]


@contextlib.contextmanager
def own_graph(agent: Agent) -> Iterator[Graph]:
    """A graph by our own agent; the server's part of it goes with ours."""
    step = partial(agent.call, SERVER, take_step)
    yield Graph(partial(apply_remotely, agent, SERVER, compute), torch.Tensor.backward, step)


@contextlib.contextmanager
def torch_graph(agent: Any) -> Iterator[Graph]:
    """The same by torch.distributed.rpc, which keeps every worker's gradients in a context of its own."""
    with dist_autograd.context() as number:
        step = partial(agent.call, SERVER, take_step_in, number)
        yield Graph(partial(agent.call, SERVER, compute), lambda loss: dist_autograd.backward(number, [loss]), step)


def compute(images: torch.Tensor) -> torch.Tensor:
    """On the server: a forward pass through its parameters."""
    return models[0](images)


def version() -> int:
    """On the server: how often its first parameter was changed in place."""
    return next(models[0].parameters())._version


@torch.no_grad()
def take_step() -> None:
    """On the server: plain SGD, in place."""
    for param in models[0].parameters():
        param -= 0.01 * param.grad


def take_step_in(context_id: int) -> None:
    """The same, with the gradients that torch keeps for this context."""
    for param, gradient in dist_autograd.get_gradients(context_id).items():
        param.grad = gradient
    take_step()
