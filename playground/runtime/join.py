"""Enter a world that torchrun, Slurm or a person started: this process is one of its ranks.

Starting and watching the ranks is that launcher's work; ours is to end up with everybody's results, and to say in one
line what went wrong.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from playground.runtime import backends, rendezvous
from playground.runtime.agreement import everybodys
from playground.runtime.environment import Place
from playground.runtime.rank import Progress, failure, report_to
from playground.runtime.rendezvous import DEFAULT_TIMEOUT
from playground.runtime.world import init_process


def join(
    place: Place,
    fn: Callable[..., Any],
    *,
    backend: str = "gloo",
    args: tuple[Any, ...] = (),
    timeout: float = DEFAULT_TIMEOUT,
    on_report: Progress | None = None,
) -> list[Any]:
    """Run `fn(rank, size, *args)` as the rank that `place` says; return every rank's result, in rank order.

    Raises what `launch` raises. After a failure the process must end at once (`os._exit`): a process group whose
    peers are gone cannot be taken down in order.
    """
    backends.named(backend).check(place.local_size, joined=True)
    if on_report:
        report_to(partial(on_report, place.rank))
    try:
        return init_process(
            place.rank, place.size, fn, backend,
            args=args, meeting=place.meeting, listener=host_of_the_store(place), timeout=timeout,
            local_rank=place.local_rank, local_size=place.local_size, joined=True, before_leaving=share,
        )  # fmt: skip
    except Exception as error:
        raise failure(error, place.rank, place.size) from error


def host_of_the_store(place: Place) -> socket.socket | None:
    """The loopback socket to serve the store on, if that is up to this process and all ranks are on this host."""
    if place.rank > 0 or not (place.meeting.served and place.meeting.local):
        return None
    return rendezvous.listen(place.meeting.host, place.meeting.port)


def share(result: Any) -> list[Any]:
    """Everybody's results, at every rank. Nobody returns before everybody has arrived."""
    results = everybodys(result)
    dist.barrier()
    return results
