"""`shm`, a backend of torch.distributed: gloo, whose collectives on one host are ours in memory
that the ranks share.

    dist.init_process_group("shm")        in any script: torch 2.15 finds it by this package's entry
    python -m playground ddp --backend shm

all_reduce, reduce_scatter_tensor, all_gather_into_tensor and broadcast of CPU tensors are ours
where all ranks of the group share memory; everything else is handed to gloo. What is asynchronous
runs in a thread, in the order of the calls, so that DistributedDataParallel computes meanwhile;
small calls only if they would have to wait for a rank. Source:
https://docs.pytorch.org/docs/stable/distributed.html#third-party-backends
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch._C._distributed_c10d import Backend, Work
from torch.autograd.graph import increment_version

from playground.algorithms import shared_memory
from playground.algorithms.background import Calls, attempt
from playground.algorithms.collectives import (
    all_gather_by,
    all_reduce_by,
    on_flat,
    reduce_scatter_by,
)
from playground.algorithms.operation import Op, check, kind
from playground.runtime.host import digest, host_id, ranks_by_host
from playground.runtime.shared_memory import NotAllCome, Segment, open_segment, outside_modes
from playground.runtime.tap.replacement import Replacement, calling
from playground.runtime.upstream import above_autograd, below_autograd, is_below_inplace

INLINE = 256 * 1024
"""Bytes up to which an asynchronous collective is over before a thread would have begun it, if all
ranks come to it."""
NO_TIMEOUT = timedelta(0)
"""In torch's options and arguments, this or less says that none is given."""
ALL_REDUCE = dist.AllreduceOptions()
BROADCAST = dist.BroadcastOptions()
BARRIER = dist.BarrierOptions()
ALL_GATHER = torch._C._distributed_c10d.AllgatherOptions()
REDUCE_SCATTER = dist.ReduceScatterOptions()
"""Those of torch's own backends where none are given."""
HANDED_ON = (
    "allgather", "allgather_coalesced", "all_gather_single_coalesced", "allreduce_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "gather", "gather_single", "reduce",
    "reduce_scatter", "reduce_scatter_single_coalesced", "scatter",
    "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip
"""The operations of gloo."""
TYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8,
    torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
"""Those of gloo, which refuses others on all ranks before anything is done."""
_backends: weakref.WeakKeyDictionary[Any, SharedMemory] = weakref.WeakKeyDictionary()
"""By process group: TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around one, which does not keep
what is in Python."""


def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have no mode of the program's, and no subclass of tensors, hear of what is called in this
    method."""

    def call(*args: Any, **named: Any) -> Any:
        with DisableTorchFunction():
            return method(*args, **named)

    return call


class SharedMemory(Backend):
    """This rank's end of one group."""

    # Asked of C++, which would ask Python again, and so on. (torch 2.15)
    supports_coalescing = supports_shrinking = supports_window = supports_reconfigure = False
    supports_splitting = True
    _supports_time_estimate = False

    def __init__(
        self, store: Any, rank: int, size: int, world: Sequence[int], timeout: timedelta
    ) -> None:
        """All ranks of the group come here; `world` is the number of each in the world."""
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.world = world
        self.part: SharedMemory | None = None
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

    def set_timeout(self, timeout: timedelta) -> None:
        """For the calls that follow: the memory's limit is read from gloo's options, too."""
        self.gloo.set_timeout(timeout)

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> SharedMemory:
        """This rank's end of a group of these ranks of this one, for `dist.split_group`."""
        world = [self.world[rank] for rank in ranks]
        self.part = SharedMemory(
            store, ranks.index(self.rank()), len(ranks), world, options._timeout
        )
        return self.part

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

    @unseen
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = ALL_REDUCE) -> Any:
        op, tensor = kind(opts.reduceOp), tensors[0]
        if not self.is_ours(tensors, op):
            return self.gloo.allreduce(tensors, opts)
        reduce = partial(shared_memory.all_reduce, self.segment, op=op)
        if op == Op.AVG and not is_written(tensor):
            return self.call(
                partial(on_flat, reduce, tensor), tensors, opts, lambda: tensor.div_(self.size())
            )
        call = partial(all_reduce_by, reduce, tensor, op, self.size())
        return self.call(counted(tensors, call) if op == Op.AVG else call, tensors, opts)

    @unseen
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = BROADCAST) -> Any:
        if not self.is_ours(tensors) or not 0 <= opts.rootRank < self.size():  # which gloo refuses
            return self.gloo.broadcast(tensors, opts)
        broadcast = partial(shared_memory.broadcast, self.segment, root=opts.rootRank)
        return self.call(partial(on_flat, broadcast, tensors[0]), tensors, opts)

    @unseen
    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = ALL_GATHER
    ) -> Any:
        if not (self.is_ours([output]) and self.is_whole(output, input)):
            return self.gloo._allgather_base(output, input, opts)
        gather = partial(shared_memory.all_gather, self.segment)
        parts = [*output.chunk(self.size())]
        if is_written(output, input) and output.is_contiguous():
            call = partial(all_gather_by, gather, output, input, self.rank(), self.size())
            return self.call(counted(parts, call), parts, opts)
        with outside_modes():
            found = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        call = partial(all_gather_by, gather, found, input, self.rank(), self.size())
        return self.call(call, parts, opts, partial(copy_all, parts, found.chunk(self.size())))

    @unseen
    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Any:
        op = kind(opts.reduceOp)
        if not (self.is_ours([input], op) and self.is_whole(input, output)):
            return self.gloo._reduce_scatter_base(output, input, opts)
        reduce = partial(shared_memory.reduce_scatter, self.segment, op=op)
        if not is_written(output, input) or 0 in output.stride():
            summed = input.clone()

            def write() -> None:
                share = summed.chunk(self.size())[self.rank()]
                output.copy_(share.div_(self.size()) if op == Op.AVG else share)

            return self.call(partial(on_flat, reduce, summed), [output], opts, write, in_wait=True)
        call = partial(reduce_scatter_by, reduce, output, input, op, self.rank(), self.size())
        return self.call(counted([output], call, in_wait=True), [output], opts)

    def barrier(self, opts: Any = BARRIER) -> Any:
        """That of gloo, which waits for what is under way on this rank."""
        if self.calls.is_idle():
            return self.gloo.barrier(opts)
        # gloo numbers its calls when they are made
        work = self.gloo.barrier(opts)
        begun = torch.futures.Future()
        self.calls.start(work.wait, begun.set_result)
        return FutureWork(begun.then(partial(give, [])), [])

    # as torch 2.14 calls them
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool) -> None:
        is_given = opts.timeout >= timedelta(0)  # otherwise the group's own holds
        self.gloo.monitored_barrier(
            opts.timeout if is_given else self.options._timeout, wait_all_ranks
        )

    def shutdown(self) -> None:
        """Leave the group. What is under way is ended first, as by gloo, as long as this process
        lives."""
        if self.segment and self.calls.is_idle():
            self.segment.leave()
        elif self.segment:
            self.calls.start(self.segment.leave, finish=lambda error: None)
        self.gloo.shutdown()

    def abort(self) -> None:
        if self.segment:
            self.segment.give_up()
        self.gloo.abort()

    def is_whole(self, whole: torch.Tensor, share: torch.Tensor) -> bool:
        """Whether a tensor consists of such shares, one for each rank; gloo refuses others."""
        if not share.numel() or not share.dim() or whole.dtype != share.dtype:
            return False
        return whole.shape == (self.size() * share.shape[0], *share.shape[1:])

    def is_ours(self, tensors: list[torch.Tensor], op: Any = Op.SUM) -> bool:
        """Whether the ranks share memory, and gloo would do this, too: what it refuses is left to
        it."""
        if not self.segment or len(tensors) != 1 or tensors[0].dtype not in TYPES:
            return False
        tensor = tensors[0]
        try:
            check(tensor.dtype, op)
        except ValueError:
            return False
        return tensor.device.type == "cpu" and tensor.layout == torch.strided

    def call(
        self,
        call: Callable[[], None],
        tensors: list[torch.Tensor],
        opts: Any,
        write: Callable[[], object] | None = None,
        in_wait: bool = False,
    ) -> Any:
        """Make this call, after those before it: here and now, or in a thread. Returns its `Work`.

        `write` does the rest on this rank by operators of torch, which autograd sees and which may
        refuse: of that the others know nothing, and the group stays usable. `in_wait`: gloo does
        that where the call is waited for.
        """
        (segment := self.segment).check()
        refused: list[BaseException] = []
        write = partial(note_error, as_here(write, in_wait), refused) if write else do_nothing
        if opts.timeout > NO_TIMEOUT:
            call = partial(segment.within, opts.timeout.total_seconds(), call)
        error: BaseException | None = None
        try:
            if not opts.asyncOp:
                self.calls.run(call)
            else:
                call = partial(segment.guard, call)  # errors before and after its meetings, too
                error = NotAllCome()
                if sum(tensor.nbytes for tensor in tensors) <= INLINE and self.calls.is_idle():
                    segment.hasty = threading.get_ident()
                    error = attempt(call)
                    if error and not isinstance(error, NotAllCome):
                        # a signal's can have come where the guard looked at another error
                        segment.give_up()
            error = error or attempt(write)
            if not error:
                return FutureWork(None, tensors)
            begun: torch.futures.Future[Any] = torch.futures.Future()
            if isinstance(error, NotAllCome):
                self.calls.start(partial(one_after_the_other, call, write), begun.set_result)
            else:
                begun.set_result(error)
            # its error is one to C++, too, where DDP waits
            ended = begun.then(partial(give, tensors))
            return FutureWork(ended, tensors, refused)
        except BaseException:  # the call may be under way, and its caller does not know
            segment.give_up()
            raise


def give(tensors: list[torch.Tensor], ended: Any) -> list[torch.Tensor]:
    """Raise the error that a call has ended with, if any."""
    if error := ended.value():
        raise error
    return tensors


def do_nothing() -> None:
    """The rest of most calls: there is none."""


def note_error(call: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        call()
    except Exception as error:
        errors.append(error)
        raise


def one_after_the_other(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def copy_all(outputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    for output, part in zip(outputs, found, strict=True):
        output.copy_(part)


def as_here(write: Callable[[], object], in_wait: bool) -> Callable[[], None]:
    """`write` as it would do here, also in a thread, under the same modes of torch; or as it would
    do `in_wait`, where autograd hears of it."""
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    mode: Callable[[], Any] = contextlib.nullcontext
    if in_wait:
        mode = above_autograd
    elif is_below_inplace():
        mode = below_autograd

    def run() -> None:
        with contextlib.ExitStack() as modes:
            modes.enter_context(DisableTorchFunction())
            modes.enter_context(torch.inference_mode(inference))
            modes.enter_context(torch.set_grad_enabled(gradients))
            modes.enter_context(mode())
            write()

    return run


def is_written(output: torch.Tensor, *inputs: torch.Tensor) -> bool:
    """Whether gloo, which leaves some results by operators of torch (`copy_`, `div_`), may write
    this tensor so, and only its version tells. Otherwise those operators have to raise, or to
    record.

    That is this rank's alone. Which way a call goes, through the memory or by gloo, depends on
    nothing that may differ between ranks: they would wait for each other for ever.
    """
    if output.is_inference() or torch.is_inference_mode_enabled():
        return False
    return not any(
        tensor.requires_grad or tensor.dtype != output.dtype for tensor in (output, *inputs)
    )


def counted(
    tensors: list[torch.Tensor], call: Callable[[], None], in_wait: bool = False
) -> Callable[[], None]:
    """This call, after which the versions of what gloo writes by operators of torch are counted up.
    It writes them in `wait`, or in a thread: not if torch does not count where we are called from,
    below a mode of the program's."""
    if not in_wait and is_below_inplace():
        return call

    def call_and_count() -> None:
        call()
        for tensor in tensors:
            increment_version(tensor)

    return call_and_count


class FutureWork(Work):
    """A call that a future tells the end of, or that has ended. torch's own work of a future waits
    for it without a limit, and does not raise its error."""

    def __init__(
        self, future: torch.futures.Future[Any] | None, tensors: list[torch.Tensor],
        refused: Sequence[BaseException] = (),
    ) -> None:  # fmt: skip
        """`refused` holds, at the end, the error of an operator of torch's: to a future it is one
        of C++'s, whose words are others."""
        super().__init__()
        self.future = future
        self.tensors = tensors
        self.refused = refused

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait as long as the call may take, or as long as is said here: then it goes on, and can
        be waited for."""
        if self.future:
            if timeout > NO_TIMEOUT and not self.future.done():
                ended = threading.Event()
                self.future.add_done_callback(lambda _: ended.set())
                if not ended.wait(timeout.total_seconds()):
                    raise RuntimeError("Operation timed out!")
            try:
                self.future.wait()
            except RuntimeError:
                if self.refused:
                    raise self.refused[0] from None
                raise
        return True

    def get_future(self) -> Any:
        if not self.future:
            self.future = torch.futures.Future()
            self.future.set_result(self.tensors)
        return self.future


class Message(Work):
    """A message of gloo's. It is completed when it has been waited for, as on gloo."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work
        self.ended = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self.work.wait(timeout)
        self.ended = True
        return True

    def get_future(self) -> Any:
        """Who has sent it, for `source_rank` and `is_completed` alone: a message of gloo's has no
        future."""
        if not self.ended:
            raise RuntimeError("Work::getFuture not implemented.")
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
    if hasattr(dist.ProcessGroup, "split_group"):
        Replacement(dist.ProcessGroup, "split_group", calling(split_shared_memory)).install()
    value = lambda future: future.value()  # noqa: E731
    for name, question, answers in (
        ("is_completed", lambda future: future.done(), bool), ("result", value, list),
        ("_source_rank", value, int), ("source_rank", value, int),
    ):  # fmt: skip
        Replacement(Work, name, calling(partial(ask_future, question, answers))).install()


# torch asks every rank for its part of the new group, and dies of None from Python. (torch 2.15)
def split_shared_memory(
    real: Callable[..., Any], parent: Any, ranks: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """`ProcessGroup.split_group`: a rank that is not in the new group has nothing to do for
    ours."""
    backend = _backends.get(parent)
    if backend and backend.rank() not in ranks:
        return None
    group = real(parent, ranks, *args, **kwargs)
    if backend and backend.part:
        _backends[group] = backend.part
        backend.part = None
    return group


# torch hands on a `Work` from Python as one that knows no more than its future. (torch 2.15)
def ask_future(
    question: Callable[[Any], Any], kind: type, real: Callable[[Any], Any], work: Any
) -> Any:
    """A method of `Work`: where torch's own has no answer, `question` of the work's future is, if
    it is of that kind."""

    def ask() -> Any:
        try:
            return question(work.get_future())
        except RuntimeError:  # it has none
            return None

    try:
        if (found := real(work)) is not False:
            return found
    except RuntimeError:
        if isinstance(told := ask(), kind):
            return told
        raise
    return bool(ask())
