"""torch.distributed: messages between two ranks, and collectives; and the messages of our own agent for remote calls,
which calls its process group itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from playground.remote.agent import Agent
from playground.see.record import COLLECTIVE, MAIN, RECEIVE, SEND, VALUES
from playground.see.record.hooks import (
    Groups,
    IssuedWorks,
    Pending,
    Ranks,
    RecordedWork,
    bytes_of,
    finish,
    is_of_torch,
    replaced,
    set_attribute,
    values_of,
    values_of_all,
)
from playground.see.record.layout import LANE_CODES, NONE
from playground.see.record.recorder import Recorder

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class CollectiveArguments:
    """Names of a function's parameters."""

    given: str = "tensor"
    """What a rank puts in: a tensor or a list of them."""
    left: str = "tensor"
    """What it has afterwards; where that is None, as with gather on all ranks but one, what it put in."""
    root: str = ""
    """The one rank among them that is special."""


COLLECTIVES = {
    "broadcast": CollectiveArguments(root="src"),
    "all_reduce": CollectiveArguments(),
    "reduce": CollectiveArguments(root="dst"),
    "all_gather": CollectiveArguments(left="tensor_list"),
    "all_gather_into_tensor": CollectiveArguments("input_tensor", "output_tensor"),
    "all_gather_single": CollectiveArguments("input_tensor", "output_tensor"),
    "gather": CollectiveArguments(left="gather_list", root="dst"),
    "scatter": CollectiveArguments(given="scatter_list", root="src"),
    "reduce_scatter": CollectiveArguments("input_list", "output"),
    "reduce_scatter_tensor": CollectiveArguments("input", "output"),
    "reduce_scatter_single": CollectiveArguments("input", "output"),
    "all_to_all": CollectiveArguments("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": CollectiveArguments("input", "output"),
    "barrier": CollectiveArguments("", ""),
    "monitored_barrier": CollectiveArguments("", ""),
}
"""The functions of torch.distributed that are recorded, as far as this torch has them: two were renamed in 2.14. What
else there is calls these."""


@contextlib.contextmanager
def recorded_distributed(recorder: Recorder, groups: Groups) -> Iterator[None]:
    """In this block, calls of torch.distributed are recorded."""
    hooks = DistributedHooks(recorder, groups)
    wraps: dict[str, Wrap] = {
        "send": hooks.wrap_send,
        "isend": hooks.wrap_send,
        "recv": hooks.wrap_receive,
        "irecv": hooks.wrap_receive,
        "batch_isend_irecv": hooks.wrap_batch,
    }
    for name, arguments in COLLECTIVES.items():
        if hasattr(dist, name):
            wraps[name] = functools.partial(hooks.wrap_collective, arguments)
    with contextlib.ExitStack() as stack:
        for name, wrap in wraps.items():
            wrapped = wrap(getattr(dist, name))
            for module in (dist, dist.distributed_c10d):  # everybody's, and that of its own functions: P2POp compares
                stack.enter_context(set_attribute(module, name, wrapped))
        yield
        hooks.issued.finish_done()


class DistributedHooks:
    def __init__(self, recorder: Recorder, groups: Groups) -> None:
        self.recorder, self.thread = recorder, recorder.thread
        self.groups = groups
        self.issued = IssuedWorks(recorder)

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
            if isinstance(result, int):  # of recv: it is done, and this is who sent it
                if from_anyone:
                    self.note_sender(number, result, group, tag)
                finish(self.recorder, [(number, (tensor,))])
                return result
            work = self.record_work(result, (number, (tensor,)))
            if from_anyone and work is not None:
                ranks = self.groups.ranks_of(group)  # the work tells which of these it was
                work.when_done = lambda: self.note_sender(number, ranks[result._source_rank()], group, tag)
            return work

        return receive

    def begin_message(
        self, kind: str, name: str, tensor: torch.Tensor, peer: int | None, group_peer: int | None, group: Any, tag: int
    ) -> int:
        """A message begins, to or from `peer`, a rank of the world, or `group_peer`, a rank of the group, or anyone."""
        ranks = self.groups.ranks_of(group)
        if group_peer is not None:
            peer = ranks[group_peer]
        message = NONE if peer is None else self.groups.next_message(kind, peer, ranks, tag)
        return self.recorder.begin(
            kind, name, bytes_of(tensor), tensor.shape, ranks, NONE if peer is None else peer, message, tag,
            source=self.recorder.sources.find(3),
        )  # fmt: skip

    def note_sender(self, number: int, peer: int, group: Any, tag: int) -> None:
        """`peer`, a rank of the world, is the one from whom a message has come."""
        message = self.groups.next_message(RECEIVE, peer, self.groups.ranks_of(group), tag)
        self.recorder.note_sender(number, peer, message)

    def record_work(self, work: Any, pending: Pending) -> RecordedWork | None:
        """None if the call has returned nothing to wait for: it was `send`, which is done; or, in a batch, all of which
        is one work for the backend, that comes in the end."""
        batch = self.thread.batch
        if batch is not None:
            batch.append(pending)
        elif work is None:
            finish(self.recorder, [pending])
        return None if work is None else RecordedWork(self.recorder, work, [pending])

    def wrap_batch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Its messages record themselves. Where the backend makes one work of all, that stands for them."""

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

    def wrap_collective(self, arguments: CollectiveArguments, real: Callable[..., Any]) -> Callable[..., Any]:
        recorder, thread, name = self.recorder, self.thread, real.__name__
        parameters = list(inspect.signature(real).parameters)
        group_at = parameters.index("group")

        @functools.wraps(real)
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = args[group_at] if len(args) > group_at else kwargs.get("group")
            if self.is_part_or_nothing(group):
                return real(*args, **kwargs)
            bound = dict(zip(parameters, args, strict=False)) | kwargs
            given = tensors_in(bound.get(arguments.given))
            left = tensors_in(bound.get(arguments.left)) or given
            number = self.begin_collective(name, given or left, group, bound, arguments.root)
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
                if not is_of_torch(sys._getframe(1)):
                    return RecordedWork(recorder, result, [(number, left)])
                self.issued.add(result, (number, left))  # torch may pass it on to C++: it gets the very work
                return result
            recorder.put_values(number, values_of_all(left))
            return result

        return collective

    def begin_collective(
        self, name: str, tensors: Sequence[torch.Tensor], group: Any, bound: Mapping[str, Any], root: str
    ) -> int:
        """A collective of these tensors begins."""
        ranks = self.groups.ranks_of(group)
        only = tensors[0] if len(tensors) == 1 else None
        return self.recorder.begin(
            COLLECTIVE,
            name,
            sum(map(bytes_of, tensors)) if only is None else bytes_of(only),
            () if only is None else only.shape,
            ranks,
            root_of(bound, root, ranks) if root else NONE,
            source=self.recorder.sources.find(3),
        )

    def is_part_or_nothing(self, group: Any) -> bool:
        """Whether a call with this group is not to be recorded: it is part of one that is, or does nothing."""
        return self.thread.is_inside or (group is not None and group == dist.GroupMember.NON_GROUP_MEMBER)

    def call_whole(self, number: int, real: Callable[..., Any], *args: Any) -> Any:
        """Call it, and do not record what it calls itself. If it fails, as from anyone on nccl, the event is over."""
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


def root_of(bound: Mapping[str, Any], name: str, ranks: Ranks) -> int:
    """The rank of the world that is the root, where there is one."""
    if not name:
        return NONE
    in_group = bound.get(f"group_{name}")
    root: int = ranks[in_group] if in_group is not None else bound.get(name) or 0
    return root


@contextlib.contextmanager
def recorded_agents(recorder: Recorder, groups: Groups) -> Iterator[None]:
    """In this block, the messages of agents that are made in it are recorded."""

    def wrap_init(real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def init(agent: Agent) -> None:
            real(agent)
            agent.group = RecordedGroup(agent.group, recorder, groups)

        return init

    with replaced(Agent, "__init__", wrap_init):
        yield


class RecordedGroup:
    """Stands for the agent's process group."""

    def __init__(self, real: Any, recorder: Recorder, groups: Groups) -> None:
        self.real, self.recorder, self.groups = real, recorder, groups
        self.ranks = groups.ranks_of(real)
        self.in_turn = threading.Lock()
        """Threads send at the same time: messages get their numbers in the order in which they leave."""

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        with self.in_turn:
            number = self.begin(SEND, "isend", tensors[0], peer, tag)
            return WorkOfACall(self.recorder, self.real.send(tensors, peer, tag), [(number, ())])

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        with self.in_turn:
            number = self.begin(RECEIVE, "irecv", tensors[0], peer, tag)
            return WorkOfACall(self.recorder, self.real.recv(tensors, peer, tag), [(number, ())])

    def begin(self, kind: str, name: str, tensor: torch.Tensor, peer: int, tag: int) -> int:
        """A message begins, to or from this rank of the group."""
        peer = self.ranks[peer]
        return self.recorder.begin(
            kind, name, tensor.nbytes, tensor.shape, self.ranks, peer,
            self.groups.next_message(kind, peer, self.ranks, tag), tag, source=self.recorder.sources.find(),
        )  # fmt: skip


class WorkOfACall(RecordedWork):
    """Of one message. Threads that listen for requests wait all the time: that is no wait of the rank's."""

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.thread.lane == LANE_CODES[MAIN]:
            return super().wait(*args, **kwargs)
        result = self.work.wait(*args, **kwargs)
        self.finish()
        return result

    def __del__(self) -> None:
        """Nobody waits for a request to be sent: the agent lets go of it when the reply has come."""
        if self.pending:
            self.finish()
