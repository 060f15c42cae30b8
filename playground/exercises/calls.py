"""In a rank: what a solution calls of torch.distributed is recorded, and made as unforgiving as the
documentation.

A tensor that is being received holds `POISON` until `wait()`, and one that is being sent may not
change before. Each thread of the solution is recorded for itself; what torch calls within a call is
not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from playground.exercises.exercise import COLLECTIVES, MESSAGES
from playground.exercises.observation import POISON, Message
from playground.exercises.transcript import FUNCTIONAL, WRITING, Meter, Request, Transcript, stop
from playground.tap import observing
from playground.tap.replacement import Wrap, replaced
from playground.world.rank.reports import report


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """The message for a tensor: gloo refuses one without elements where the receiver names no
    source."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def world_rank(group: Any, peer: int | None, group_peer: int | None) -> int | None:
    """The rank in the world of `peer`, or of `group_peer` in the group. None: anyone."""
    return (
        peer if group_peer is None else dist.get_global_rank(group or dist.group.WORLD, group_peer)
    )


def send(
    record: Transcript,
    real: Any,
    tensor: Any,
    dst: Any = None,
    group: Any = None,
    tag: int = 0,
    group_dst: Any = None,
) -> Any:
    """`send`, and `isend`, which sends a copy."""
    peer, is_async = world_rank(group, dst, group_dst), real.__name__ == "isend"
    with record.within(real.__name__, peer, not is_async, [tensor]) as line:
        copy = fill(tensor.detach().clone() if is_async and tensor.is_contiguous() else tensor)
        held = tensor.detach().clone() if is_async else tensor
        work = real(copy, dst, group, tag, group_dst)
    record.actions.sent.append(Message(peer or 0, tensor.numel()))
    record.add_moved([tensor])
    return Request(record, work, "isend", peer, line, tensor, copy, held) if is_async else work


def recv(
    record: Transcript,
    real: Any,
    tensor: Any,
    src: Any = None,
    group: Any = None,
    tag: int = 0,
    group_src: Any = None,
) -> Any:
    """`recv`, and `irecv`, which receives a copy."""
    peer, is_async = world_rank(group, src, group_src), real.__name__ == "irecv"
    with record.within(real.__name__, peer, not is_async, [tensor]) as line:
        copy = fill(torch.empty_like(tensor) if is_async and tensor.is_contiguous() else tensor)
        result = real(copy, src, group, tag, group_src)
    if is_async:
        held = tensor.data.copy_(torch.tensor(POISON)).clone()
        return Request(record, result, "irecv", peer, line, tensor, copy, held)
    record.actions.received.append(result if peer is None else peer)
    return result


def all_reduce(
    record: Transcript,
    real: Any,
    tensor: Any,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    record.actions.reduced.append(tensor.numel())
    with record.within("all_reduce", None, not async_op, [tensor]) as line:
        if not async_op:
            return real(tensor, op, group)
        copy, held = tensor.detach().clone(), tensor.detach().clone()
        work = real(copy, op, group, True)
    return Request(record, work, "all_reduce", None, line, tensor, copy, held) if work else None


def new_group(record: Transcript, real: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    ranks = None if ranks is None else sorted(ranks)
    if not kwargs.get("use_local_synchronization"):
        report(group=tuple(ranks or range(record.size)))
    with record.within("new_group"):
        return real(ranks, *args, **kwargs)


def call(record: Transcript, real: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective that only counts."""
    given = *args, *kwargs.values()
    with record.within(real.__name__, None, not kwargs.get("async_op"), given):
        return real(*args, **kwargs)


OWN_WAYS: dict[str, Callable[..., Any]] = {
    "send": send,
    "isend": send,
    "recv": recv,
    "irecv": recv,
    "all_reduce": all_reduce,
    "new_group": new_group,
}
"""How a function of torch.distributed is called for a solution, where not by `call`."""


def keep_world(record: Transcript, real: Callable[..., None]) -> Callable[..., None]:
    """In the place of a function that makes or ends the world: only groups may be destroyed."""

    def change(group: Any = None, *args: Any, **kwargs: Any) -> None:
        if group in (None, dist.group.WORLD) or real.__name__ == "init_process_group":
            words = f"{real.__name__}(): the ranks have their world, and still need it: take it out"
            stop(words, record.line())
        real(group)

    return change


def wrap_wait(record: Transcript, real: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of a future's `wait`."""

    def wait(future: Any) -> Any:
        with record.waiting():
            return real(future)

    return wait


def wrap_function(record: Transcript, real: Any) -> Callable[..., Any]:
    """In the place of a function of torch.distributed: what the solution calls is recorded."""
    way: Callable[..., Any] = OWN_WAYS.get(real.__name__, call)

    @functools.wraps(real)
    def function(*args: Any, **kwargs: Any) -> Any:
        if record.is_theirs():
            return way(record, real, *args, **kwargs)
        return real(*args, **kwargs)

    return function


def list_wraps(record: Transcript, meter: Meter) -> dict[tuple[Any, str], Wrap]:
    """What is replaced while a solution runs, by owner and name, and by what."""
    keep = functools.partial(keep_world, record)
    wraps: dict[tuple[Any, str], Wrap] = {
        (dist, "init_process_group"): keep,
        (dist, "destroy_process_group"): keep,
        (torch._C.Future, "wait"): functools.partial(wrap_wait, record),
    }
    wraps |= {(dist.Store, name): meter.wrap_store for name in WRITING}
    for name in vars(_functional_collectives):
        if name.removesuffix("_autograd") in FUNCTIONAL:
            wraps[_functional_collectives, name] = meter.wrap_functional
    # the same function in both modules, as P2POp compares them
    wrap = functools.cache(functools.partial(wrap_function, record))
    for module in (dist, distributed_c10d):
        wraps |= {(module, name): wrap for name in (*MESSAGES, *COLLECTIVES)}
    return wraps


@contextlib.contextmanager
def judged(record: Transcript) -> Iterator[None]:
    """Record what the solution does, and keep it from ending the world."""
    meter = Meter(record)
    with contextlib.ExitStack() as stack:
        for (owner, name), wrap in list_wraps(record, meter).items():
            stack.enter_context(replaced(owner, name, wrap))
        stack.enter_context(observing(meter))
        yield
