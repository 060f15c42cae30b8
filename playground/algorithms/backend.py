"""`shm`, a backend of torch.distributed: gloo, whose collectives on one host are ours in memory that the ranks share.

    dist.init_process_group("shm")        in any script: torch 2.15 finds it by the entry point of this package
    python -m playground ddp --backend shm

all_reduce, reduce_scatter_tensor, all_gather_into_tensor and broadcast of CPU tensors are ours where all ranks of the
group share memory; everything else is handed to gloo. What is asynchronous and large runs in a thread, in the order of
the calls, so that DistributedDataParallel computes meanwhile.
Source: https://docs.pytorch.org/docs/stable/distributed.html#third-party-backends
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _create_work_from_future

from playground.algorithms import shared_memory
from playground.algorithms.collectives import all_gather_by, all_reduce_by, on_flat, reduce_scatter_by
from playground.algorithms.hosts import Hosts
from playground.algorithms.operation import ADDS, Op, check, kind
from playground.runtime.host import digest, host_id
from playground.runtime.shared_memory import Segment, open_segment

INLINE = 256 * 1024
"""Bytes up to which a collective is over before a thread would have begun it."""
HANDED_ON = (
    "allgather", "allgather_coalesced", "all_gather_single_coalesced", "allreduce_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier", "gather", "gather_single", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_single_coalesced", "scatter", "send", "abort",
    "shutdown",
)  # fmt: skip
"""The operations of gloo. (Receiving from any rank is not among them: torch does not hand on who has sent.)"""
NO_TIME = timedelta(0)
"""Less than this stands for the group's own timeout."""


class SharedMemory(Backend):
    """This rank's end of one group."""

    # Asked of C++, which would ask Python again, and so on. (torch 2.15)
    supports_coalescing = supports_splitting = supports_shrinking = supports_window = supports_reconfigure = False
    _supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.timeout = timeout
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shm")
        self.last: Future[None] | None = None
        self.found: Segment | str = ""
        """The memory that the ranks share, or why they share none; empty as long as nobody has asked."""

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        return "shm"

    @property
    def options(self) -> Any:
        return self.gloo.options

    def segment(self) -> Segment | None:
        """The memory that all ranks of the group share; None if they share none. The first time, all must ask."""
        if not self.found and self.size() == 1:
            self.found = "there is one"
        elif not self.found:
            hosts = Hosts.from_ids(self.exchange([digest(host_id())]))
            why = "ranks are on several hosts" * hosts.several
            self.found = why or open_segment(self.rank(), hosts.members, self.exchange, self.timeout.total_seconds())
            if isinstance(self.found, str):
                shared_memory.say_why_not(self.found, self.rank())
        if isinstance(self.found, str):
            return None
        self.found.require_own_process()
        return self.found

    def exchange(self, values: Any) -> list[tuple[int, ...]]:
        """All-gather of a few numbers, by gloo."""
        own = torch.tensor(values, dtype=torch.int64)
        told = [torch.empty_like(own) for _ in range(self.size())]
        self.gloo.allgather([told], [own]).wait()
        return [tuple(each.tolist()) for each in told]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        op, segment = kind(opts.reduceOp), self.segment()
        if segment is None or not is_ours(tensors, op):
            return self.gloo.allreduce(tensors, opts)
        reduce = partial(shared_memory.all_reduce, segment, op=op)
        return self.start(partial(all_reduce_by, reduce, tensors[0], op, self.size()), tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        segment = self.segment()
        if segment is None or not is_ours(tensors):
            return self.gloo.broadcast(tensors, opts)
        broadcast = partial(shared_memory.broadcast, segment, root=opts.rootRank)
        return self.start(partial(on_flat, broadcast, tensors[0]), tensors, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        segment = self.segment()
        whole = output.numel() == self.size() * input.numel() and output.dtype == input.dtype
        if segment is None or not is_ours([output]) or not whole or not output.is_contiguous():
            return self.gloo._allgather_base(output, input, opts)
        gather = partial(shared_memory.all_gather, segment)
        return self.start(partial(all_gather_by, gather, output, input, self.rank(), self.size()), [output], opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        op, segment = kind(opts.reduceOp), self.segment()
        whole = input.numel() == self.size() * output.numel() and output.dtype == input.dtype
        if segment is None or not is_ours([input], op) or not whole:
            return self.gloo._reduce_scatter_base(output, input, opts)
        reduce = partial(shared_memory.reduce_scatter, segment, op=op)
        call = partial(reduce_scatter_by, reduce, output, input, op, self.rank(), self.size())
        return self.start(call, [output], opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # as torch 2.14 calls them

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        self.gloo.monitored_barrier(opts.timeout if opts.timeout > NO_TIME else self.timeout, wait_all_ranks)

    def start(self, call: Callable[[], None], tensors: list[torch.Tensor], opts: Any) -> Any:
        """Make this call, after those before it: here and now, or in a thread. Returns its `Work`."""
        begun: torch.futures.Future[Any] = torch.futures.Future()

        def run(_: object) -> list[torch.Tensor]:
            call()
            return tensors

        idle = self.last is None or self.last.done()
        if opts.asyncOp and not (idle and tensors[0].nbytes <= INLINE):
            ended = begun.then(run)  # so that an error in it is one to C++ too: DistributedDataParallel waits there
            self.last = self.thread.submit(begun.set_result, None)
            return _create_work_from_future(ended)
        if self.last:
            self.last.result()
        begun.set_result(run(None))
        return _create_work_from_future(begun)


def hand_on(name: str) -> Callable[..., Any]:
    """The operation of gloo of that name."""
    return lambda self, *args: getattr(self.gloo, name)(*args)


for _name in HANDED_ON:
    setattr(SharedMemory, _name, hand_on(_name))


def is_ours(tensors: list[torch.Tensor], op: Any = Op.SUM) -> bool:
    """Whether our collectives are defined for these."""
    if len(tensors) != 1 or tensors[0].device.type != "cpu" or tensors[0].layout != torch.strided or op not in ADDS:
        return False
    try:
        check(tensors[0].dtype, op)
    except ValueError:
        return False
    return True


def register() -> None:
    """Make `shm` known to torch.distributed; torch calls this when somebody asks for it."""

    def create(options: Any, _: Any) -> SharedMemory:
        return SharedMemory(options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend.register_backend("shm", create, extended_api=True, devices=["cpu"])
