"""torch.distributed.rpc, to be called as our own agent is.

It meets at the store that the world meets at, and binds to the network interface that gloo does. Upstream it is in
maintenance mode. Source: https://docs.pytorch.org/docs/stable/rpc.html
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from playground.runtime.errors import UsageError

FEWEST_THREADS = 16
"""That answer requests: torch's own default. More ranks need more (pytorch/pytorch#85607)."""
SPARE_THREADS = 4
OUR_STORE = "playground"
"""The scheme of the init method with which `init_rpc` takes the store that the world has met at."""
NO_LIMIT = 0.0
"""Seconds that a call may take: whoever watches over the ranks ends what hangs."""
DEPRECATED_INSIDE = "You are using a Backend .* as a ProcessGroup"
"""What torch warns of in a call that it makes itself (pytorch/pytorch#149393)."""


class TorchAgent:
    """This rank's end of all remote calls, as `Agent` is. Every rank makes one, and leaves it with the others.

    Raises `UsageError` where torch has no RPC.
    """

    def __init__(self) -> None:
        if not rpc.is_available():
            raise UsageError(f"this torch ({torch.__version__}) has no RPC, as on Windows: call over send and recv")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def __enter__(self) -> TorchAgent:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            os.environ["TP_SOCKET_IFNAME"] = interface  # stays: this process is not as it was, see `remote`
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=max(FEWEST_THREADS, self.size + SPARE_THREADS), init_method=f"{OUR_STORE}://"
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", DEPRECATED_INSIDE)
            rpc.init_rpc(worker_name(self.rank), rank=self.rank, world_size=self.size, rpc_backend_options=options)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            rpc.shutdown()

    def on_loss(self, callback: Callable[[int], None]) -> None:
        """Does nothing: torch's RPC tells nobody which rank is lost."""

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        dist.barrier()

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns on that rank. Raises what it raises there."""
        return rpc.rpc_sync(worker_name(rank), function, args, timeout=NO_LIMIT)

    def call_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """The same, without waiting: a `torch.futures.Future`."""
        return rpc.rpc_async(worker_name(rank), function, args, timeout=NO_LIMIT)

    def remote(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` on that rank, leave the result there: an `RRef`. They work in a process's first RPC
        only: what counts them goes on asking the first agent (RRefContext::getInstance, in C++)."""
        return rpc.remote(worker_name(rank), function, args, timeout=NO_LIMIT)


def worker_name(rank: int) -> str:
    return f"rank{rank}"


def meet_at_our_store(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's rendezvous: the store, and this rank's place. To connect to the store once more would be in vain: in a
    world that we have launched, it takes no connection any more."""
    yield dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


dist.register_rendezvous_handler(OUR_STORE, meet_at_our_store)
