"""The published mistake, then the same training by all-reduce and by a server in every mode."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from playground.lessons.parameter_server.baseline import train_by_all_reduce
from playground.lessons.parameter_server.lesson import ParameterServer, servers, train_with_server
from playground.lessons.parameter_server.mistake import repeat_the_mistake
from playground.lessons.parameter_server.results import ModeResult, ServerResult
from playground.lessons.parameter_server.settings import SERVER, ServerSettings
from playground.lessons.parameter_server.workers import new_model, warm_up
from playground.remote.agents import AGENTS
from playground.runtime import PeerDisconnected
from playground.runtime.agreement import require_same_on_all_ranks

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
    """The server's part: wait for what comes of all-reduce, then serve in every mode."""
    agent.on_loss(lambda rank: delivered.put(None))
    by_all_reduce = delivered.get()
    if not by_all_reduce:
        raise PeerDisconnected(SERVER, workers + 1, "has lost a worker in training by all-reduce")
    result, parameters = by_all_reduce
    return [result, *(serve_mode(agent, mode, workers, settings, parameters) for mode in settings.modes)]


def serve_mode(
    agent: Any, mode: str, workers: int, settings: ServerSettings, early_by_all_reduce: torch.Tensor
) -> ModeResult:
    """Make the server, say that it is there, and wait. Other threads answer the workers' calls.

    `early_by_all_reduce`: the parameters after the first few steps without a server, to compare with.
    """
    server = ParameterServer(new_model(settings), mode, workers, settings)
    servers[:] = [server]
    agent.on_loss(lambda rank: server.lose_worker(rank - 1))
    agent.barrier()
    server.join()
    return server.history.result(server.model, server.taken, server.lost, early_by_all_reduce)


def work(agent: Any, workers: Any, settings: ServerSettings) -> None:
    """A worker's part: by all-reduce first, then with a server in every mode."""
    warm_up(settings, workers)
    result, parameters = train_by_all_reduce(workers, settings)
    if agent.rank == SERVER + 1:
        agent.call(SERVER, deliver, result, parameters)
    for _ in settings.modes:
        agent.barrier()
        train_with_server(agent, workers, settings)


def deliver(result: ModeResult, parameters: torch.Tensor) -> None:
    """Runs on the server: keep what all-reduce has come to."""
    delivered.put((result, parameters))
