"""`shm`, a backend of torch.distributed: gloo, whose collectives on one host are ours in memory that the ranks share.

    dist.init_process_group("shm")        in any script: torch 2.15 finds it by the entry point of this package
    python -m playground ddp --backend shm

all_reduce, reduce_scatter_tensor, all_gather_into_tensor and broadcast of CPU tensors are ours where all ranks of the
group share memory; everything else is handed to gloo. What is asynchronous runs in a thread, in the order of the calls,
so that DistributedDataParallel computes meanwhile; small calls only if they would have to wait for a rank.
Source: https://docs.pytorch.org/docs/stable/distributed.html#third-party-backends
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch._C._distributed_c10d import Backend, Work, _create_work_from_future

from playground.algorithms import shared_memory
from playground.algorithms.background import Calls, attempt
from playground.algorithms.collectives import all_gather_by, all_reduce_by, on_flat, reduce_scatter_by
from playground.algorithms.operation import ADDS, Op, check, kind
from playground.runtime.host import digest, host_id, ranks_by_host
from playground.runtime.shared_memory import NotAllCome, Segment, open_segment
from playground.runtime.tap.replacement import Replacement

INLINE = 256 * 1024
"""Bytes up to which an asynchronous collective is over before a thread would have begun it, if all ranks come to it."""
NO_TIMEOUT = timedelta(0)
"""In torch's options and arguments, this or less says that none is given."""
HANDED_ON = (
    "allgather", "allgather_coalesced", "all_gather_single_coalesced", "allreduce_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "gather", "gather_single", "reduce", "reduce_scatter",
    "reduce_scatter_single_coalesced", "scatter", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip
"""The operations of gloo."""
TYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int32,
    torch.int64,
}  # fmt: skip
"""Those of gloo, which refuses others on all ranks before anything is done."""
_backends: weakref.WeakKeyDictionary[Any, SharedMemory] = weakref.WeakKeyDictionary()
"""By process group: TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around one, which does not keep what is in Python."""


class SharedMemory(Backend):
    """This rank's end of one group."""

    # Asked of C++, which would ask Python again, and so on. (torch 2.15)
    supports_coalescing = supports_splitting = supports_shrinking = supports_window = supports_reconfigure = False
    _supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta) -> None:
        """All ranks of the group come here; `world` is the number of each in the world."""
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        with DisableTorchFunction():  # no mode or default device of the program's is in force
            self.segment: Any = self.open_segment(world)
        """The memory that all ranks of the group share; None if they share none."""
        self.calls = Calls()
        weakref.finalize(self, self.calls.waiting.put, None)

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        return "shm"

    @property
    def options(self) -> Any:
        return self.gloo.options

    def open_segment(self, world: Sequence[int]) -> Segment | None:
        if self.size() == 1:
            return None
        hosts, options = ranks_by_host(self.exchange([digest(host_id())])), self.options
        found: Segment | str = "ranks are on several hosts"
        if len(hosts) == 1:
            timeout = lambda: options._timeout.total_seconds()  # noqa: E731 - which the program may set
            found = open_segment(self.rank(), hosts, world, self.exchange, timeout)
        if isinstance(found, str):
            shared_memory.say_why_not(found, self.rank())
            return None
        return found

    def exchange(self, values: Any) -> list[tuple[int, ...]]:
        """All-gather of a few numbers, by gloo."""
        own = torch.tensor(values, dtype=torch.int64)
        told = [torch.empty_like(own) for _ in range(self.size())]
        self.gloo.allgather([told], [own]).wait()
        return [tuple(each.tolist()) for each in told]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        op = kind(opts.reduceOp)
        if not self.is_ours(tensors, op):
            return self.gloo.allreduce(tensors, opts)
        reduce = partial(shared_memory.all_reduce, self.segment, op=op)
        return self.call(partial(all_reduce_by, reduce, tensors[0], op, self.size()), tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if not self.is_ours(tensors):
            return self.gloo.broadcast(tensors, opts)
        broadcast = partial(shared_memory.broadcast, self.segment, root=opts.rootRank)
        return self.call(partial(on_flat, broadcast, tensors[0]), tensors, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        whole = output.numel() == self.size() * input.numel() and output.dtype == input.dtype
        if not self.is_ours([output]) or not whole or not output.is_contiguous():
            return self.gloo._allgather_base(output, input, opts)
        gather = partial(shared_memory.all_gather, self.segment)
        return self.call(partial(all_gather_by, gather, output, input, self.rank(), self.size()), [output], opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        op = kind(opts.reduceOp)
        whole = input.numel() == self.size() * output.numel() and output.dtype == input.dtype
        if not self.is_ours([input], op) or not whole or 0 in output.stride():  # which gloo refuses
            return self.gloo._reduce_scatter_base(output, input, opts)
        reduce = partial(shared_memory.reduce_scatter, self.segment, op=op)
        call = partial(reduce_scatter_by, reduce, output, input, op, self.rank(), self.size())
        return self.call(call, [output], opts)

    def barrier(self, opts: Any) -> Any:
        """That of gloo, which waits for what is under way on this rank."""
        if self.calls.is_idle():
            return self.gloo.barrier(opts)
        work, begun = self.gloo.barrier(opts), torch.futures.Future()  # gloo numbers its calls when they are made
        self.calls.start(work.wait, begun.set_result)
        return FutureWork(begun.then(partial(give, [])))

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # as torch 2.14 calls them

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        is_given = opts.timeout >= timedelta(0)  # otherwise the group's own holds
        self.gloo.monitored_barrier(opts.timeout if is_given else self.options._timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Leave the group. What is under way is ended first, as by gloo, as long as this process lives."""
        if self.segment and self.calls.is_idle():
            self.segment.leave()
        elif self.segment:
            self.calls.start(self.segment.leave, finish=lambda error: None)
        self.gloo.shutdown()

    def abort(self) -> None:
        if self.segment:
            self.segment.give_up()
        self.gloo.abort()

    def is_ours(self, tensors: list[torch.Tensor], op: Any = Op.SUM) -> bool:
        """Whether the ranks share memory, and gloo would do this, too: what it refuses is left to it."""
        if not self.segment or len(tensors) != 1 or (tensor := tensors[0]).dtype not in TYPES or op not in ADDS:
            return False
        try:
            check(tensor.dtype, op)
        except ValueError:
            return False
        return tensor.device.type == "cpu" and tensor.layout == torch.strided

    def call(self, call: Callable[[], None], tensors: list[torch.Tensor], opts: Any) -> Any:
        """Make this call, after those before it: here and now, or in a thread. Returns its `Work`."""
        (segment := self.segment).check()
        if opts.timeout > NO_TIMEOUT:
            call = partial(segment.within, opts.timeout.total_seconds(), call)
        try:
            begun: torch.futures.Future[Any] = torch.futures.Future()
            error: BaseException | None = None
            if not opts.asyncOp:
                self.calls.run(call)
            else:
                call, error = partial(segment.guard, call), NotAllCome()  # errors before and after its meetings, too
                if tensors[0].nbytes <= INLINE and self.calls.is_idle():
                    segment.hasty = threading.get_ident()
                    error = attempt(call)
                if isinstance(error, NotAllCome):
                    self.calls.start(call, begun.set_result)
                elif error:
                    segment.give_up()  # a signal's can have come where the guard looked at another error
                    begun.set_result(error)
            if error:
                return FutureWork(begun.then(partial(give, tensors)))  # its error is one to C++, too, where DDP waits
            begun.set_result(tensors)
            return _create_work_from_future(begun)
        except BaseException:  # the call may be under way, and its caller does not know
            segment.give_up()
            raise


def give(tensors: list[torch.Tensor], ended: Any) -> list[torch.Tensor]:
    """Raise the error that a call has ended with, if any."""
    if error := ended.value():
        raise error
    return tensors


class FutureWork(Work):
    """An asynchronous call. torch's own work of a future waits for it, and does not raise its error."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self.future, self.ended = future, threading.Event()
        future.add_done_callback(lambda _: self.ended.set())

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait as long as the call may take, or as long as is said here: then it goes on, and can be waited for."""
        if timeout > NO_TIMEOUT and not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        self.future.wait()
        return True

    def get_future(self) -> Any:
        return self.future


class Message(Work):
    """A message of gloo's. It is completed when it has been waited for, as on gloo."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.ended = work, False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self.work.wait(timeout)
        self.ended = True
        return True

    def get_future(self) -> Any:
        """Who has sent it, for `source_rank` and `is_completed` alone: a message of gloo's has no future."""
        if not self.ended:
            raise RuntimeError("a message has no future: wait() for its work")
        sender: torch.futures.Future[Any] = torch.futures.Future()
        try:
            sender.set_result(self.work._source_rank())
        except RuntimeError:  # this one has sent it
            sender.set_result(None)
        return sender


def hand_on(name: str, wrap: Callable[[Any], Any] = lambda result: result) -> Callable[..., Any]:
    """The operation of gloo of that name."""
    return lambda self, *args: wrap(getattr(self.gloo, name)(*args))


for _name in HANDED_ON:
    setattr(SharedMemory, _name, hand_on(_name))
for _name in ("send", "recv", "recv_anysource"):
    setattr(SharedMemory, _name, hand_on(_name, Message))


def register() -> None:
    """Make `shm` known to torch.distributed; torch calls this when somebody asks for it."""

    def create(options: Any, _: Any) -> SharedMemory:
        rank, size = options.group_rank, options.group_size
        world = options.global_ranks_in_group or range(size)
        backend = SharedMemory(options.store, rank, size, world, options.timeout)
        _backends[options.process_group] = backend
        return backend

    dist.Backend.register_backend("shm", create, extended_api=True, devices=["cpu"])
    for name, wrap in {"is_completed": wrap_is_completed, "_source_rank": wrap_source_rank}.items():
        Replacement(Work, name, wrap).install()


# torch hands on a `Work` from Python as one that knows no more than its future. (torch 2.15)
def wrap_is_completed(real: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_completed(work: Any) -> bool:
        try:
            return real(work) or work.get_future().done()
        except RuntimeError:  # it has none
            return False

    return is_completed


def wrap_source_rank(real: Callable[[Any], int]) -> Callable[[Any], int]:
    def source_rank(work: Any) -> int:
        try:
            return real(work)
        except RuntimeError:
            if isinstance(sender := work.get_future().value(), int):
                return sender
            raise

    return source_rank
