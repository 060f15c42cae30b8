"""The methods of `ProcessGroup` that are operations, and how to read their arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup


class Method(NamedTuple):
    """A method of a process group."""

    name: str
    """That of its function in torch.distributed; of `send` and `recv`, those that block have it."""
    input_at: int | None
    output_at: int | None
    """Which parameter is what this rank gives, and which is what it gets: a tensor, a list of them,
    or of lists."""


METHODS = {
    method: operation
    for method, operation in {
        "allreduce": Method("all_reduce", 0, 0),
        "allreduce_coalesced": Method("all_reduce_coalesced", 0, 0),
        "broadcast": Method("broadcast", 0, 0),
        "reduce": Method("reduce", 0, 0),
        "allgather": Method("all_gather", 1, 0),
        "allgather_coalesced": Method("all_gather_coalesced", 1, 0),
        "allgather_into_tensor_coalesced": Method("all_gather_into_tensor_coalesced", 1, 0),
        "all_gather_single_coalesced": Method("all_gather_into_tensor_coalesced", 1, 0),
        "_allgather_base": Method("all_gather_into_tensor", 1, 0),
        "all_gather_single": Method("all_gather_into_tensor", 1, 0),
        "gather": Method("gather", 1, 0),
        "scatter": Method("scatter", 1, 0),
        "reduce_scatter": Method("reduce_scatter", 1, 0),
        "_reduce_scatter_base": Method("reduce_scatter_tensor", 1, 0),
        "reduce_scatter_single": Method("reduce_scatter_tensor", 1, 0),
        "reduce_scatter_tensor_coalesced": Method("reduce_scatter_tensor_coalesced", 1, 0),
        "reduce_scatter_single_coalesced": Method("reduce_scatter_tensor_coalesced", 1, 0),
        "alltoall": Method("all_to_all", 1, 0),
        "alltoall_base": Method("all_to_all_single", 1, 0),
        "all_to_all_single": Method("all_to_all_single", 1, 0),
        "barrier": Method("barrier", None, None),
        "monitored_barrier": Method("monitored_barrier", None, None),
        "send": Method("send", 0, None),
        "recv": Method("recv", None, 0),
        "recv_anysource": Method("recv", None, 0),
    }.items()
    if hasattr(ProcessGroup, method)
}
"""By the name of the method. Those that this torch lacks are left out: names differ between its
versions."""
MESSAGES = ("send", "recv", "recv_anysource")
ROOT_AT = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}
"""By the name of the method: which parameter is the root, or options that have it."""
PARAMETER = re.compile(r"[(,] ?(\w+): ")
SIGNATURES = {
    method: [
        PARAMETER.findall(line)[1:]  # without self
        for line in (getattr(ProcessGroup, method).__doc__ or "").splitlines()
        if f"{method}(self: " in line
    ]
    for method in METHODS
}
"""By the name of the method, the parameters of each of its overloads: C++ tells them in its
documentation alone."""


def by_position(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any] | None:
    """The arguments of a method's call by position, None in the place of one that is left out; None
    if it takes no such arguments."""
    if not kwargs:
        return args
    for names in SIGNATURES[method]:
        rest = names[len(args) :]
        if kwargs.keys() <= {*rest}:
            return (*args, *(kwargs.get(name) for name in rest[: 1 + max(map(rest.index, kwargs))]))
    return None


def root_of(method: str, args: Sequence[Any]) -> int | None:
    """The root of a call, as a number in its group, 0 by default; None if the call has none."""
    if method not in ROOT_AT:
        return None
    given = args[ROOT_AT[method]] if len(args) > ROOT_AT[method] else 0
    root = getattr(given, "rootRank", given)
    return root if isinstance(root, int) else None
