"""Records torch.distributed: messages between two ranks, and collectives; and the messages of our own agent for remote
calls, which calls its process group itself.

All recorders of calls share replaced functions, the ranks of process groups, the values of tensors, and works: they
wrap what a call returns, and record waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from playground.remote.agent import Agent
from playground.see.record import COLLECTIVE, MAIN, RECEIVE, SEND, VALUES
from playground.see.record.layout import LANE_CODES, MAX_VALUES, NONE
from playground.see.record.recorder import Recorder

Wrap = Callable[[Any], Any]
"""Makes the function that replaces another."""
Ranks = tuple[int, ...]
Counts = defaultdict[tuple[str, int], Iterator[int]]
"""Numbers of the next messages, by kind and by the other rank. Both ends count alike."""


class Groups:
    """The process groups of a recording."""

    def __init__(self) -> None:
        self.ranks: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
        self.counts: defaultdict[tuple[Ranks, int], Counts] = defaultdict(lambda: defaultdict(itertools.count))
        """Numbers of messages by group and tag."""

    def ranks_of(self, group: Any) -> Ranks:
        """The group's ranks in the world, in the group's order. None is the whole world."""
        group = group or dist.group.WORLD
        if group not in self.ranks:
            try:
                self.ranks[group] = tuple(dist.get_process_group_ranks(group))
            except KeyError:  # torch's RPC makes one of all ranks, which torch.distributed does not know
                self.ranks[group] = tuple(range(group.size()))
        return self.ranks[group]

    def next_message(self, kind: str, peer: int, ranks: Ranks, tag: int) -> int:
        """The number of the next message of this kind to or from `peer`."""
        return next(self.counts[ranks, tag][kind, peer])


def bytes_of(tensor: torch.Tensor) -> int:
    """The size of a tensor's elements; of a sparse tensor, that of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else 0


def values_of(tensor: torch.Tensor) -> list[float] | None:
    """The values of a tensor, flat; None if it is too large, or on a GPU, where reading it would have to wait."""
    if tensor.numel() > MAX_VALUES or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    values: list[float] = tensor.tolist() if tensor.dim() == 1 else tensor.flatten().tolist()
    return values


def values_of_all(tensors: Sequence[torch.Tensor]) -> list[float] | None:
    """The values of several tensors, one after the other."""
    if len(tensors) == 1:
        return values_of(tensors[0])
    if not tensors or sum(tensor.numel() for tensor in tensors) > MAX_VALUES:
        return None
    parts = [values_of(tensor) for tensor in tensors]
    return None if None in parts else [value for part in parts for value in part or ()]


def replaced(owner: Any, name: str, wrap: Wrap) -> contextlib.AbstractContextManager[None]:
    """In this block, `owner.name` is replaced by `wrap(owner.name)`."""
    return set_attribute(owner, name, wrap(getattr(owner, name)))


@contextlib.contextmanager
def set_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block, `owner.name` is `value`."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


TORCH = os.path.join(os.path.dirname(torch.__file__), "")
"""Prefix of the names of torch's files."""
Pending = tuple[int, Sequence[torch.Tensor]]
"""The number of an event that is not over, and the tensors of its result."""


def finish(recorder: Recorder, pending: Sequence[Pending]) -> None:
    """Record the ends of these events, now."""
    recorder.end_all([number for number, _ in pending])
    for number, tensors in pending:
        recorder.put_values(number, values_of_all(tensors))


class IssuedWorks:
    """Works for which torch waits by itself. Their events end when their futures are done."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.issued: dict[Any, Pending] = {}
        """Events that are not over, by future."""

    def add(self, work: Any, pending: Pending) -> None:
        future = work.get_future()
        self.issued[future] = pending
        future.add_done_callback(lambda _: self.finish(future))

    def finish(self, future: Any) -> None:
        """Record the end of a work, unless it has been recorded before."""
        if (pending := self.issued.pop(future, None)) is not None:
            finish(self.recorder, [pending])

    def finish_done(self) -> None:
        """Record the ends of works that are done: the thread that calls their callbacks may be late."""
        for future in [future for future in list(self.issued) if future.done()]:
            self.finish(future)


class RecordedWork:
    """A `Work` of torch's or of ours that records waits for it."""

    def __init__(self, recorder: Recorder, work: Any, pending: Sequence[Pending]) -> None:
        self.recorder, self.work, self.pending = recorder, work, pending
        self.when_done: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def __del__(self) -> None:
        """It cannot be waited for any more."""
        if self.pending and self.work.is_completed():
            self.finish()

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pending:
            return self.work.wait(*args, **kwargs)
        recorder = self.recorder
        wait = recorder.begin_wait([number for number, _ in self.pending], recorder.sources.find())
        try:
            result = self.work.wait(*args, **kwargs)
        finally:
            recorder.end(wait)
        self.finish()
        return result

    def get_future(self) -> Any:
        """The future, which may be waited for instead of the work."""
        future = self.work.get_future()
        future.add_done_callback(lambda _: self.finish())
        return future

    def finish(self) -> None:
        pending, self.pending = self.pending, ()
        self.when_done()
        finish(self.recorder, pending)


COLLECTIVES = {
    "broadcast": ("tensor", "tensor", "src"),
    "all_reduce": ("tensor", "tensor", ""),
    "reduce": ("tensor", "tensor", "dst"),
    "all_gather": ("tensor", "tensor_list", ""),
    "all_gather_into_tensor": ("input_tensor", "output_tensor", ""),
    "all_gather_single": ("input_tensor", "output_tensor", ""),
    "gather": ("tensor", "gather_list", "dst"),
    "scatter": ("scatter_list", "tensor", "src"),
    "reduce_scatter": ("input_list", "output", ""),
    "reduce_scatter_tensor": ("input", "output", ""),
    "reduce_scatter_single": ("input", "output", ""),
    "all_to_all": ("input_tensor_list", "output_tensor_list", ""),
    "all_to_all_single": ("input", "output", ""),
    "barrier": ("", "", ""),
    "monitored_barrier": ("", "", ""),
}
"""The functions of torch.distributed that are recorded, if this torch has them: two were renamed in 2.14.

Each with the names of the parameters that are the input of a rank, a tensor or a list of them; the output (if that is
None, as with gather on all ranks but one, the input is taken); and the root, if it has one.
"""


class DistributedHooks:
    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        self.recorder, self.groups, self.thread = recorder, groups, recorder.thread
        self.issued = IssuedWorks(recorder)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record calls of torch.distributed in this block."""
        wraps: dict[str, Wrap] = {"batch_isend_irecv": self.wrap_batch}
        wraps |= dict.fromkeys(("send", "isend"), self.wrap_send) | dict.fromkeys(("recv", "irecv"), self.wrap_receive)
        for name, parameters in COLLECTIVES.items():
            if hasattr(dist, name):
                wraps[name] = functools.partial(self.wrap_collective, *parameters)
        with contextlib.ExitStack() as stack:
            for name, wrap in wraps.items():
                wrapped = wrap(getattr(dist, name))
                for module in (dist, dist.distributed_c10d):  # the same in both, as P2POp compares functions
                    stack.enter_context(set_attribute(module, name, wrapped))
            yield
            self.issued.finish_done()

    def wrap_send(self, real: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        @functools.wraps(real)
        def send(tensor: torch.Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
            if self.is_part_or_nothing(group):
                return real(tensor, dst, group, tag, group_dst)
            number = self.begin_message(SEND, real.__name__, tensor, dst, group_dst, group, tag)
            recorder.put_values(number, values_of(tensor))
            return self.record_work(self.call_whole(number, real, tensor, dst, group, tag, group_dst), (number, ()))

        return send

    def wrap_receive(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def receive(
            tensor: torch.Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None
        ) -> Any:
            if self.is_part_or_nothing(group):
                return real(tensor, src, group, tag, group_src)
            number = self.begin_message(RECEIVE, real.__name__, tensor, src, group_src, group, tag)
            result = self.call_whole(number, real, tensor, src, group, tag, group_src)
            from_anyone = src is None and group_src is None
            if isinstance(result, int):  # the sender: recv is done
                if from_anyone:
                    self.note_sender(number, result, group, tag)
                finish(self.recorder, [(number, (tensor,))])
                return result
            work = self.record_work(result, (number, (tensor,)))
            if from_anyone and work is not None:
                ranks = self.groups.ranks_of(group)  # the work knows the sender
                work.when_done = lambda: self.note_sender(number, ranks[result._source_rank()], group, tag)
            return work

        return receive

    def begin_message(
        self, kind: str, name: str, tensor: torch.Tensor, peer: int | None, group_peer: int | None, group: Any, tag: int
    ) -> int:
        """Begin a message to or from `peer`, a rank of the world, or `group_peer`, a rank of the group, or anyone."""
        ranks = self.groups.ranks_of(group)
        if group_peer is not None:
            peer = ranks[group_peer]
        other, message = (NONE, NONE) if peer is None else (peer, self.groups.next_message(kind, peer, ranks, tag))
        source = self.recorder.sources.find(3)
        nbytes = bytes_of(tensor)
        return self.recorder.begin(kind, name, nbytes, tensor.shape, ranks, other, message, tag, source=source)

    def note_sender(self, number: int, peer: int, group: Any, tag: int) -> None:
        """Record that a message received from anyone came from `peer`, a rank of the world."""
        message = self.groups.next_message(RECEIVE, peer, self.groups.ranks_of(group), tag)
        self.recorder.note_sender(number, peer, message)

    def record_work(self, work: Any, pending: Pending) -> RecordedWork | None:
        """The recorded work; None if the call returned none: `send` is done, and a batch may have one work for all."""
        batch = self.thread.batch
        if batch is not None:
            batch.append(pending)
        elif work is None:
            finish(self.recorder, [pending])
        return None if work is None else RecordedWork(self.recorder, work, [pending])

    def wrap_batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record a batch. Its messages record themselves; a backend may return one work for all of them."""

        @functools.wraps(real)
        def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
            if self.thread.is_inside:
                return real(p2p_op_list)
            batch: list[Pending] = []
            self.thread.batch = batch
            try:
                works = real(p2p_op_list)
            finally:
                self.thread.batch = None
            if all(isinstance(work, RecordedWork) for work in works):
                return works
            return [RecordedWork(self.recorder, work, () if place else batch) for place, work in enumerate(works)]

        return batch_isend_irecv

    def wrap_collective(self, given_by: str, left_in: str, root: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Record a collective with these parameters: see `COLLECTIVES`."""
        recorder, thread, name = self.recorder, self.thread, real.__name__
        parameters = list(inspect.signature(real).parameters)
        group_at = parameters.index("group")

        @functools.wraps(real)
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = args[group_at] if len(args) > group_at else kwargs.get("group")
            if self.is_part_or_nothing(group):
                return real(*args, **kwargs)
            bound = dict(zip(parameters, args, strict=False)) | kwargs
            given = tensors_in(bound.get(given_by))
            left = tensors_in(bound.get(left_in)) or given
            number = self.begin_collective(name, given or left, group, bound, root)
            before = values_of_all(given)
            if before is not None:
                recorder.instant(VALUES, "before", before, parent=number)
            thread.is_inside = True
            try:
                result = real(*args, **kwargs)
            finally:
                thread.is_inside = False
                recorder.end(number)
            if result is not None and bound.get("async_op"):
                recorder.resume(number)
                if not sys._getframe(1).f_code.co_filename.startswith(TORCH):
                    return RecordedWork(recorder, result, [(number, left)])
                self.issued.add(result, (number, left))  # torch may pass the work itself on to C++
                return result
            recorder.put_values(number, values_of_all(left))
            return result

        return collective

    def begin_collective(
        self, name: str, tensors: Sequence[torch.Tensor], group: Any, bound: Mapping[str, Any], root: str
    ) -> int:
        """Begin a collective of these tensors. `root` names the parameter that is the root, if it has one."""
        ranks, peer = self.groups.ranks_of(group), NONE
        shape = tensors[0].shape if len(tensors) == 1 else ()
        if root:
            in_group = bound.get(f"group_{root}")
            peer = ranks[in_group] if in_group is not None else bound.get(root) or 0
        source = self.recorder.sources.find(3)
        nbytes = sum(map(bytes_of, tensors))
        return self.recorder.begin(COLLECTIVE, name, nbytes, shape, ranks, peer, source=source)

    def is_part_or_nothing(self, group: Any) -> bool:
        """Whether a call with this group is part of a recorded one, or does nothing."""
        return self.thread.is_inside or (group is not None and group == dist.GroupMember.NON_GROUP_MEMBER)

    def call_whole(self, number: int, real: Callable[..., Any], *args: Any) -> Any:
        """Call it without recording the calls inside. If it fails, as from anyone on nccl, the event ends."""
        self.thread.is_inside = True
        try:
            return real(*args)
        except BaseException:
            self.recorder.end(number)
            raise
        finally:
            self.thread.is_inside = False


def tensors_in(value: Any) -> list[torch.Tensor]:
    """A tensor, a list of them, or None, as a list."""
    return [value] if isinstance(value, torch.Tensor) else list(value or ())


def recorded_agents(recorder: Recorder, groups: Groups) -> contextlib.AbstractContextManager[None]:
    """Record the messages of agents that are made in this block."""

    def wrap_init(real: Callable[..., None]) -> Callable[..., None]:
        def init(agent: Agent) -> None:
            real(agent)
            agent.group = RecordedGroup(agent.group, recorder, groups)

        return init

    return replaced(Agent, "__init__", wrap_init)


class RecordedGroup:
    """An agent's process group that records its messages."""

    def __init__(self, real: Any, recorder: Recorder, groups: Groups) -> None:
        self.real, self.recorder, self.groups = real, recorder, groups
        self.ranks = groups.ranks_of(real)
        self.in_turn = threading.Lock()
        """Several threads send: messages are numbered in the order in which they leave."""

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        return self.start(SEND, "isend", self.real.send, tensors, peer, tag)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        return self.start(RECEIVE, "irecv", self.real.recv, tensors, peer, tag)

    def start(
        self, kind: str, name: str, real: Callable[..., Any], tensors: Sequence[torch.Tensor], peer: int, tag: int
    ) -> RecordedWork:
        """Start a message to or from this rank of the group."""
        ranks, other, [tensor], source = self.ranks, self.ranks[peer], tensors, self.recorder.sources.find(3)
        with self.in_turn:
            what = kind, name, tensor.nbytes, tensor.shape, ranks, other
            message = self.groups.next_message(kind, other, ranks, tag)
            number = self.recorder.begin(*what, message, tag, source=source)
            return WorkOfACall(self.recorder, real(tensors, peer, tag), [(number, ())])


class WorkOfACall(RecordedWork):
    """The work of a message. Threads that listen for requests wait all the time, which is not a wait of the rank."""

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.thread.lane == LANE_CODES[MAIN]:
            return super().wait(*args, **kwargs)
        result = self.work.wait(*args, **kwargs)
        self.finish()
        return result

    def __del__(self) -> None:
        """The agent drops the work of a request when the reply has come, without a wait."""
        if self.pending:
            self.finish()
