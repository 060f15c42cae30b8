"""What is measured: in which groups of ranks, and with tensors of which sizes. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Cost, Task
from playground.algorithms.hosts import Hosts
from playground.runtime.errors import UsageError
from playground.tools.scale.settings import MAX_RANKS, MIN_RANKS

COSTS: dict[str, Callable[[Task], Cost]] = {
    name: spec.cost.load() for name, spec in ALGORITHMS.items() if spec.cost is not None
}
"""Every algorithm that has a cost, by name."""
FITTED_SIZES = (4, 2 << 10, 32 << 10, 512 << 10, 4 << 20, 16 << 20)
HELD_OUT_SIZES = (256, 8 << 10, 128 << 10, 1 << 20, 8 << 20)
"""Bytes. The sizes held out lie between those fitted on."""
FITTED_BETWEEN = (4, 2 << 10, 1 << 20, 4 << 20)
HELD_OUT_BETWEEN = (256, 32 << 10, 2 << 20)
"""The same where they go from host to host. A link may be slow, so they are few; what it swallows at once, in its
buffers, must be little beside the large ones."""


@dataclass(frozen=True)
class Sample:
    """What one algorithm took."""

    algorithm: str
    size: int
    """Ranks in the group."""
    nbytes: int
    seconds: float
    node: int = field(default=1, kw_only=True)
    """How many of the group share a host, where hosts are told apart."""


@dataclass(frozen=True)
class Effort:
    """How much may be measured."""

    seconds: float
    """For how long rounds begin."""
    fitted: tuple[int, ...]
    """Sizes of tensors to fit to, in bytes."""
    held_out: tuple[int, ...]
    """Those only to predict."""
    fitted_between: tuple[int, ...]
    """Both again, from host to host."""
    held_out_between: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that are measured together."""

    ranks: tuple[int, ...]
    node: int = 1
    """How many of them share a host, where hosts are told apart."""
    fitted: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.fitted, *self.held_out)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured."""

    names: tuple[str, ...]
    """The algorithms."""
    groups: tuple[Group, ...]
    seconds: float
    """For how long rounds begin."""
    hosts: int = 1
    ranks_per_host: int
    cores: int
    """Of each host."""
    all_cores: int
    """Of all hosts: fewer than theirs together where these are simulated, and share a machine."""

    def is_fitted(self, sample: Sample) -> bool:
        """Whether the model is fitted to it; others it has only to predict."""
        return any(
            (len(group.ranks), group.node) == (sample.size, sample.node) and sample.nbytes in group.fitted
            for group in self.groups
        )

    def cores_for(self, sample: Sample) -> int | None:
        """Those that the ranks of the sample's group share; None if each rank has a host to itself."""
        if self.ranks_per_host == 1:
            return None
        hosts = -(-sample.size // sample.node) if self.hosts > 1 else 1
        return min(hosts * self.cores, self.all_cores)


def effort(seconds: float) -> Effort:
    """All sizes, in rounds that begin for so long."""
    return Effort(seconds, FITTED_SIZES, HELD_OUT_SIZES, FITTED_BETWEEN, HELD_OUT_BETWEEN)


def plan_for(hosts: Hosts, effort: Effort, cores: int, all_cores: int) -> Plan:
    """What to measure on these hosts. Raises `UsageError` for a world that is too small, too large, or uneven."""
    size = sum(map(len, hosts.members))
    if not MIN_RANKS <= size <= MAX_RANKS and not (hosts.several and size <= MAX_RANKS):
        raise UsageError(
            f"{size} ranks: measuring takes {MIN_RANKS} to {MAX_RANKS}, on several hosts 2 to {MAX_RANKS}; for a "
            f"cluster give --alpha and --beta"
        )
    one_level = tuple(name for name in COSTS if not ALGORITHMS[name].needs_hosts)
    return Plan(
        names=tuple(COSTS) if hosts.several else one_level,
        groups=tuple(groups_of_hosts(hosts, effort) if hosts.several else groups_of_one_host(size, effort)),
        seconds=effort.seconds, hosts=len(hosts.members), ranks_per_host=hosts.smallest, cores=cores,
        all_cores=all_cores,
    )  # fmt: skip


def groups_of_one_host(size: int, effort: Effort) -> Iterator[Group]:
    """Sizes of groups to fit on, and others only to predict."""
    fitted = sorted({2, size // 2})
    for members in fitted:
        yield Group(ranks=tuple(range(members)), fitted=effort.fitted)
    for members in sorted({3, size} - {*fitted}):
        yield Group(ranks=tuple(range(members)), held_out=effort.held_out)


def groups_of_hosts(hosts: Hosts, effort: Effort) -> Iterator[Group]:
    """Two ranks of one host, and one rank on each of two: each pair has a level to itself, and the model is fitted to
    both. Larger groups, on one level or on both, it has to predict. Raises `UsageError` for hosts that are not alike.
    """
    first, node = hosts.members[0], hosts.smallest
    size = node * len(hosts.members)
    if tuple(chain.from_iterable(hosts.members)) != tuple(range(size)) or {*map(len, hosts.members)} != {node}:
        counts = ", ".join(str(len(host)) for host in hosts.members)
        raise UsageError(
            f"hosts with {counts} ranks: measuring both levels takes as many ranks on each host, consecutive ones"
        )
    heads = tuple(host[0] for host in hosts.members)
    yield Group(ranks=heads[:2], fitted=effort.fitted_between, held_out=effort.held_out_between)
    if len(heads) > 2:
        yield Group(ranks=heads, held_out=effort.held_out_between)
    if node > 1:
        yield Group(ranks=first[:2], node=2, fitted=effort.fitted, held_out=effort.held_out)
        yield Group(ranks=tuple(range(size)), node=node, held_out=effort.held_out_between)
    if node > 2:
        yield Group(ranks=first, node=node, held_out=effort.held_out)
