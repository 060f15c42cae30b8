"""A parameter server: one rank owns the parameters, the others compute gradients, each on a copy of its own.

    python -m playground parameter-server
    python -m playground parameter-server --slow-worker 5
    python -m playground parameter-server -n 9 --mode async --over rpc

Rank 0 is the server. A worker pulls the parameters, computes a gradient on its part of a batch and pushes it; the reply
brings the parameters for the next one. When the server takes a step, and when it replies, is the mode: synchronous,
asynchronous, or in between. All that travels are remote calls, over our own agent (playground/remote/) or torch's RPC.
First comes the server that many have copied, which fails with more than one worker: mistake.py. Ours: server.py.
Sources: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Ho et al., More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.lessons.parameter_server.baseline import train_by_all_reduce
from playground.lessons.parameter_server.mistake import repeat_the_mistake
from playground.lessons.parameter_server.results import ModeResult, ServerResult
from playground.lessons.parameter_server.server import Parameters, ParameterServer, Push, load_parameters, worker_lost
from playground.lessons.parameter_server.settings import SERVER, ServerSettings
from playground.lessons.parameter_server.workers import new_model, paced, warm_up, whole_batches
from playground.remote.agents import AGENTS
from playground.runtime.agreement import require_same_on_all_ranks
from playground.training.replicas import flat

servers: list[ParameterServer] = []
"""On the server's rank: the one that answers."""
delivered: SimpleQueue[tuple[ModeResult, torch.Tensor] | None] = SimpleQueue()
"""On the server's rank: what the workers have come to without it, with the parameters; None if one of them died."""


def run(rank: int, size: int, settings: ServerSettings) -> ServerResult:
    """Repeat the published mistake, train by all-reduce, then by a server in every mode.

    The server's rank returns what came of the modes, each worker what it met in the mistake.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    workers = dist.new_group(list(range(1, size)))
    with AGENTS[settings.over]() as agent:
        mistake = repeat_the_mistake(agent, workers)
        if rank == SERVER:
            modes = serve(agent, size - 1, settings)
        else:
            modes = []
            work(agent, workers, settings)
    return ServerResult(mistake=mistake, modes=modes)


def serve(agent: Any, workers: int, settings: ServerSettings) -> list[ModeResult]:
    """The server's part: make it, say that it is there, and wait. Other threads answer the workers' calls."""
    agent.on_loss(lambda rank: delivered.put(None))
    by_all_reduce = delivered.get()
    if not by_all_reduce:
        raise worker_lost(workers, "has lost a worker in training by all-reduce")
    result, parameters = by_all_reduce
    return [result, *(serve_mode(agent, mode, workers, settings, parameters) for mode in settings.modes)]


def serve_mode(
    agent: Any, mode: str, workers: int, settings: ServerSettings, early_by_all_reduce: torch.Tensor
) -> ModeResult:
    """The same in one mode."""
    server = ParameterServer(new_model(settings), mode, workers, settings)
    servers[:] = [server]
    agent.on_loss(lambda rank: server.lose_worker(rank - 1))
    agent.barrier()
    return server.result(early_by_all_reduce)


def work(agent: Any, workers: Any, settings: ServerSettings) -> None:
    """A worker's part: by all-reduce first, then with a server in every mode."""
    warm_up(settings, workers)
    result, parameters = train_by_all_reduce(workers, settings)
    if agent.rank == SERVER + 1:
        agent.call(SERVER, deliver, result, parameters)
    for _ in settings.modes:
        agent.barrier()
        train_with_server(agent, workers, settings)


def train_with_server(agent: Any, workers: Any, settings: ServerSettings) -> None:
    """Compute a gradient on a copy of the parameters, push it, and get the next copy, until the server says enough."""
    model, coming = new_model(settings), whole_batches(settings, workers)
    worker = dist.get_rank(workers)
    parameters, version, finished = agent.call(SERVER, pull, worker)
    while not finished:
        with paced(settings, workers):
            images, labels, samples_per_worker = next(coming)
            load_parameters(model, parameters)
            model.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            (loss / samples_per_worker).backward()
        gradient = flat(param.grad for param in model.parameters()).cpu()
        computed = Push(worker, gradient, version, loss.item(), len(labels))
        parameters, version, finished = agent.call(SERVER, push, computed)


def pull(worker: int) -> Parameters:
    """Runs on the server: the parameters."""
    return servers[0].pull(worker)


def push(computed: Push) -> Parameters:
    """Runs on the server: take a gradient, return the parameters for the next."""
    return servers[0].push(computed)


def deliver(result: ModeResult, parameters: torch.Tensor) -> None:
    """Runs on the server: keep what all-reduce has come to."""
    delivered.put((result, parameters))


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("parameter-server")
