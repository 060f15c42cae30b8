"""The plan of a measurement: which groups of ranks, with which sizes. Does not import torch.

The ranks of one host share its cores, and the model has one level. On several hosts it has two:
what a message costs inside a host, and what it costs between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Cost, Task
from playground.base.errors import UsageError
from playground.tools.scale.settings import MAX_RANKS, MIN_RANKS

COSTS: dict[str, Callable[[Task], Cost]] = {
    name: spec.cost.load() for name, spec in ALGORITHMS.items() if spec.cost is not None
}
"""Every algorithm that has a cost, by name."""
Key = tuple[str, int, int, int]
"""(algorithm, size of the group, bytes, how many of the group share a host)."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured. Sizes are bytes of a tensor."""

    seconds: float
    """How long rounds begin."""
    fitted: Sequence[int]
    """Sizes to fit to."""
    held_out: Sequence[int]
    """Sizes between those, only to predict."""
    fitted_between: Sequence[int]
    held_out_between: Sequence[int]
    """Both again, from host to host: few, as a link may be slow, and the large ones far above what
    its buffers hold."""


EFFORT = Effort(
    seconds=10.0,
    fitted=(4, 2 << 10, 32 << 10, 512 << 10, 4 << 20),
    held_out=(256, 8 << 10, 128 << 10, 2 << 20),
    fitted_between=(4, 2 << 10, 1 << 20, 4 << 20),
    held_out_between=(256, 32 << 10, 2 << 20),
)


@dataclass(frozen=True)
class Group:
    """Ranks that are measured together, with tensors of these sizes in bytes."""

    ranks: Sequence[int]
    node: int = 1
    """How many of them are on each host, where hosts are told apart."""
    fitted: Sequence[int] = ()
    held_out: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a measurement."""

    algorithms: Sequence[str]
    groups: Sequence[Group]
    seconds: float
    """How long rounds begin."""
    hosts: int
    ranks_per_host: int
    cores: int
    """Cores of each host."""
    all_cores: int
    """Cores of all hosts: fewer than theirs together where hosts are simulated, and share a
    machine."""


def plan_for(hosts: Sequence[tuple[int, ...]], effort: Effort, cores: int, all_cores: int) -> Plan:
    """The plan of a measurement on these hosts, given as the ranks of each. Raises `UsageError` for
    a world that is too small, too large, or uneven."""
    size = sum(map(len, hosts))
    least = 2 if len(hosts) > 1 else MIN_RANKS
    if not least <= size <= MAX_RANKS:
        raise UsageError(
            f"{size} ranks: measuring takes {MIN_RANKS} to {MAX_RANKS}, on several hosts 2 to "
            f"{MAX_RANKS}; for a "
            f"cluster give --alpha and --beta"
        )
    algorithms = [name for name in COSTS if len(hosts) > 1 or not ALGORITHMS[name].needs_hosts]
    groups = groups_of_hosts(hosts, effort) if len(hosts) > 1 else groups_of_one_host(size, effort)
    return Plan(
        algorithms=algorithms,
        groups=[*groups],
        seconds=effort.seconds,
        hosts=len(hosts),
        ranks_per_host=min(map(len, hosts)),
        cores=cores,
        all_cores=all_cores,
    )


def groups_of_one_host(size: int, effort: Effort) -> Iterator[Group]:
    """The smallest group and the largest to fit on, and others between them only to predict: each
    message takes longer where more ranks share the cores, which no smaller group shows."""
    fitted = [2, size]
    for members in fitted:
        yield Group([*range(members)], fitted=effort.fitted)
    for members in sorted({3, size // 2} - {*fitted}):
        yield Group([*range(members)], held_out=effort.held_out)


def groups_of_hosts(hosts: Sequence[tuple[int, ...]], effort: Effort) -> Iterator[Group]:
    """Two ranks of one host, and one rank on each of two: each pair has a level to itself, and the
    model is fitted to both. Larger groups, on one level or on both, it has to predict. Raises
    `UsageError` for hosts that are not alike.
    """
    first, node, few = hosts[0], min(map(len, hosts)), effort.held_out_between
    size = node * len(hosts)
    if tuple(chain.from_iterable(hosts)) != tuple(range(size)) or {*map(len, hosts)} != {node}:
        counts = ", ".join(str(len(host)) for host in hosts)
        raise UsageError(
            f"hosts with {counts} ranks: measuring both levels takes as many ranks on each host, "
            "consecutive ones"
        )
    heads = [host[0] for host in hosts]
    yield Group(heads[:2], fitted=effort.fitted_between, held_out=few)
    if len(heads) > 2:
        yield Group(heads, held_out=few)
    if node > 1:
        yield Group(first[:2], 2, effort.fitted, effort.held_out)
        yield Group([*range(size)], node, held_out=few)
    if node > 2:
        yield Group(first, node, held_out=effort.held_out)
