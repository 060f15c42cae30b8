"""What torch calls in C++, where no method of Python's is called: the buckets that
DistributedDataParallel averages, its broadcasts, and functional collectives, which DTensor uses.

Hooks of the process groups tell of it. Source: `ProcessGroup.register_pre_hook` (torch 2.14; older
versions have no such hooks). torch waits for such a call itself, and is seen to do so in two
places: `wait_tensor` of functional collectives, and the end of a backward pass, before which
DistributedDataParallel waits for its buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

from playground.base.upstream import FUNCTIONAL
from playground.tap.replacement import original

HOOK_ID = 20171
"""Identifies the tap's hooks of a process group."""
METHOD_OF_HOOK = {
    "ALLREDUCE": "allreduce",
    "ALLREDUCE_COALESCED": "allreduce_coalesced",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "ALLGATHER": "allgather",
    "ALLGATHER_COALESCED": "allgather_coalesced",
    "ALLGATHER_INTO_TENSOR_COALESCED": "allgather_into_tensor_coalesced",
    "ALLGATHER_BASE": "_allgather_base",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter_tensor_coalesced",
    "ALLTOALL": "alltoall",
    "ALLTOALL_BASE": "alltoall_base",
    "BARRIER": "barrier",
}
"""The method of a process group, as in `methods.METHODS`, by the name that its hooks have for it.
Messages are called in Python."""
OPERATORS = ("torch._ops", FUNCTIONAL)
"""Modules that call functional collectives."""
HAS_HOOKS = hasattr(ProcessGroup, "register_pre_hook")


def listen(group: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Have the group's hooks call these, with what torch tells of a call before and after it."""
    if HAS_HOOKS:
        group.register_pre_hook(HOOK_ID, before)
        group.register_post_hook(HOOK_ID, after)


def stop_listening(group: Any) -> None:
    if not HAS_HOOKS:
        return
    try:
        group.unregister_pre_hook(HOOK_ID)
        group.unregister_post_hook(HOOK_ID)
    except RuntimeError:  # it has been destroyed
        return


def arguments(method: str, hook: Any, root_at: int | None) -> tuple[Any, ...]:
    """The arguments of a call, in the places that `methods.METHODS` has for them."""
    given, got = hook.input_tensors, hook.output_tensors
    if method == "barrier":
        return ()
    args = [got or given, given, None, None]
    if root_at == 1:  # broadcast and reduce work in place
        args[1] = hook.root
    elif root_at is not None:
        args[root_at] = hook.root
    return tuple(args)


def is_functional() -> bool:
    """Whether the call that is being made is a functional collective: its caller goes on, and
    calls `wait_tensor` later. To be called by a function that a hook calls."""
    frame = sys._getframe(1).f_back
    return frame is not None and frame.f_globals.get("__name__") in OPERATORS


def call_when_done(work: Any, callback: Callable[[], None]) -> bool:
    """Have `callback` called when the backend has done the work, by a thread of the backend. Its
    CUDA stream then waits for the work. Returns False if the backend tells no such moment.

    The flight recorder does not know of it: such a callback calls no operation.
    """
    try:
        future = original(type_with(work, "get_future"), "get_future")(work)
    except (RuntimeError, NotImplementedError):  # of a message, or of a backend in Python
        return False
    original(type_with(future, "add_done_callback"), "add_done_callback")(
        future, lambda _: callback()
    )
    return True


def type_with(value: Any, name: str) -> type:
    """The class of a value that has this attribute."""
    return next(kind for kind in type(value).__mro__ if name in vars(kind))
