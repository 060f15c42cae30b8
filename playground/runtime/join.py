"""Enter a world that torchrun, Slurm or a person started: this process is one of its ranks.

Starting and watching the ranks is that launcher's work; ours is to end up with everybody's results, and to say in one
line what went wrong.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from playground.runtime import backends
from playground.runtime.agreement import all_gather_object
from playground.runtime.environment import RankEnv
from playground.runtime.errors import PeerDisconnected
from playground.runtime.rank import Progress, failure, report_to
from playground.runtime.rendezvous import DEFAULT_TIMEOUT, listen
from playground.runtime.world import init_process

PRECEDENCE = 0.5
"""Seconds by which a rank whose peer is gone ends after that peer. torchrun looks every 0.1 s who has ended, and blames
the first that it finds."""


def join(
    env: RankEnv,
    fn: Callable[..., Any],
    *,
    backend: str = "gloo",
    args: tuple[Any, ...] = (),
    timeout: float = DEFAULT_TIMEOUT,
    on_report: Progress | None = None,
) -> list[Any]:
    """Run `fn(rank, size, *args)` as the rank that `env` says; return every rank's result, in rank order.

    Raises what `launch` raises. After a failure the process must end at once (`os._exit`): a process group whose
    peers are gone cannot be taken down in order.
    """
    backends.get_backend(backend).check(env.local_size, joined=True)
    if on_report:
        report_to(partial(on_report, env.rank))
    try:
        return init_process(
            env.rank, env.size, fn, backend,
            args=args, rendezvous=env.rendezvous, listener=bind_store(env), timeout=timeout,
            local_rank=env.local_rank, local_size=env.local_size, joined=True, before_leaving=share,
        )  # fmt: skip
    except Exception as error:
        failed = failure(error, env.rank, env.size)
        if isinstance(failed, PeerDisconnected):
            time.sleep(PRECEDENCE)
        raise failed from error


def bind_store(env: RankEnv) -> socket.socket | None:
    """The loopback socket to serve the store on, if that is up to this process and all ranks are on this host."""
    if env.rank > 0 or not (env.rendezvous.served and env.rendezvous.local):
        return None
    return listen(env.rendezvous.host, env.rendezvous.port)


def share(result: Any) -> list[Any]:
    """Everybody's results, at every rank. Nobody returns before everybody has arrived."""
    results = all_gather_object(result)
    dist.barrier()
    return results
