"""torch.distributed.rpc with the interface of our own agent.

It uses the store of the world for its rendezvous, and the network interface of gloo. Upstream it is in maintenance
mode. Source: https://docs.pytorch.org/docs/stable/rpc.html
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

THREADS = 16
"""Minimum number of threads that answer requests: torch's default. More ranks need more (pytorch/pytorch#85607)."""
OUR_STORE = "playground"
"""Scheme of the init method with which `init_rpc` uses the store of the world."""
NO_LIMIT = 0.0
"""Timeout of a call, in seconds, where 0 is none: the launcher ends hung ranks."""
DEPRECATED_INSIDE = "You are using a Backend .* as a ProcessGroup"
"""A warning of torch about its own call (pytorch/pytorch#149393)."""


class TorchAgent:
    """This rank's end of all remote calls, as `Agent`. Every rank creates one, and leaves it with the others."""

    barrier = staticmethod(dist.barrier)

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def __enter__(self) -> TorchAgent:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            os.environ["TP_SOCKET_IFNAME"] = interface  # stays: this process is not as it was, see `remote`
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=max(THREADS, self.size + 4), init_method=f"{OUR_STORE}://"
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", DEPRECATED_INSIDE)
            rpc.init_rpc(worker_name(self.rank), rank=self.rank, world_size=self.size, rpc_backend_options=options)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            rpc.shutdown()

    def on_loss(self, callback: Callable[[int], None]) -> None:
        """Does nothing: torch's RPC does not report lost ranks."""

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` on that rank. Returns its result, or raises its exception."""
        return rpc.rpc_sync(worker_name(rank), function, args, timeout=NO_LIMIT)

    def call_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Like `call`, but returns a `torch.futures.Future`."""
        return rpc.rpc_async(worker_name(rank), function, args, timeout=NO_LIMIT)

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` on that rank, and keep the result there. Returns an `RRef`. They work only in a
        process's first RPC, as their counts stay with the first agent (RRefContext::getInstance, in C++)."""
        return rpc.remote(worker_name(rank), function, args, timeout=NO_LIMIT)


def worker_name(rank: int) -> str:
    return f"rank{rank}"


def meet_at_our_store(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """A rendezvous handler: the store, rank and size of the world. A new connection to the store would fail: in a world
    that we have launched, it accepts no more."""
    yield dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


dist.register_rendezvous_handler(OUR_STORE, meet_at_our_store)
