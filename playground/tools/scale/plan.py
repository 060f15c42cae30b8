"""The plan of a measurement, and the model fitted to it: latency, bandwidth and the speed of adding, how far it is from
what was held out, and its predictions. Does not import torch.

The ranks of one host share its cores, and the model has one level. On several hosts it has two: what a message costs
inside a host, and what it costs between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from operator import mul
from statistics import median
from typing import Any

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Cost, Machine, Task
from playground.measurement import Fields
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag

MIN_RANKS, DEFAULT_RANKS, MAX_RANKS = 4, 8, 16
"""Ranks to measure with. More would need much memory: all-to-all has N² tensors under way."""
MAX_SECONDS = 1e6
"""Largest time for a message, or a byte: beyond any machine, and far from where sums of them overflow."""
ABOVE_ZERO: Any = {"above": 0, "most": MAX_SECONDS, "metavar": "SECONDS"}


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Raises `UsageError` for half a description of a cluster."""

    size: int | None = flag(
        None,
        "Number of ranks to measure with.",
        least=MIN_RANKS,
        most=MAX_RANKS,
        name="-n --world-size",
        click={"show_default": str(DEFAULT_RANKS)},
    )
    alpha: float | None = flag(None, "Latency of a message. With --alpha and --beta nothing is measured.", **ABOVE_ZERO)
    beta: float | None = flag(None, "Inverse bandwidth: seconds per byte; 1e-10 is 10 GB/s.", **ABOVE_ZERO)
    gamma: float | None = flag(
        None, "Time to add or copy one byte.", least=0, click={"show_default": "0"}, most=MAX_SECONDS, metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        if (self.alpha is None) != (self.beta is None):
            raise UsageError("--alpha and --beta belong together: give both, or neither to have them measured")
        if self.alpha is None or self.beta is None:
            if self.gamma is not None:
                raise UsageError("--gamma describes a cluster: add --alpha and --beta")
        elif self.size is not None:
            raise UsageError(f"-n {self.size} with --alpha and --beta: nothing is measured then, leave -n out")

    @property
    def machine(self) -> Machine | None:
        """The cluster that is described; None if this host is measured instead."""
        if self.alpha is None or self.beta is None:
            return None
        return Machine(self.alpha, self.beta, self.gamma or 0)


COSTS: dict[str, Callable[[Task], Cost]] = {
    name: spec.cost.load() for name, spec in ALGORITHMS.items() if spec.cost is not None
}
"""Every algorithm that has a cost, by name."""
Key = tuple[str, int, int, int]
"""(algorithm, size of the group, bytes, how many of the group share a host)."""


@dataclass(frozen=True)
class Sample:
    """The time of one algorithm."""

    algorithm: str
    size: int
    """Ranks in the group."""
    nbytes: int
    seconds: float
    node: int = field(default=1, kw_only=True)
    """How many of the group share a host, where hosts are told apart."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. Sizes of tensors are in bytes."""

    seconds: float = 10.0
    """For how long rounds begin."""
    fitted: tuple[int, ...] = (4, 2 << 10, 32 << 10, 512 << 10, 8 << 20)
    held_out: tuple[int, ...] = (256, 8 << 10, 128 << 10, 2 << 20)
    """Sizes only to predict, between those to fit to."""
    fitted_between: tuple[int, ...] = (4, 2 << 10, 1 << 20, 4 << 20)
    """Both again, from host to host: few, as a link may be slow, and the large ones far above what its buffers hold."""
    held_out_between: tuple[int, ...] = (256, 32 << 10, 2 << 20)


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
    """The measurements to take."""

    names: tuple[str, ...]
    """The algorithms."""
    groups: tuple[Group, ...]
    seconds: float
    """For how long rounds begin."""
    hosts: int = 1
    ranks_per_host: int
    cores: int
    """Cores of each host."""
    all_cores: int
    """Cores of all hosts: fewer than theirs together where these are simulated, and share a machine."""

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


def plan_for(hosts: Sequence[tuple[int, ...]], effort: Effort, cores: int, all_cores: int) -> Plan:
    """The plan for these hosts. Raises `UsageError` for a world that is too small, too large, or uneven."""
    size = sum(map(len, hosts))
    if not MIN_RANKS <= size <= MAX_RANKS and not (len(hosts) > 1 and size <= MAX_RANKS):
        raise UsageError(
            f"{size} ranks: measuring takes {MIN_RANKS} to {MAX_RANKS}, on several hosts 2 to {MAX_RANKS}; for a "
            f"cluster give --alpha and --beta"
        )
    one_level = tuple(name for name in COSTS if not ALGORITHMS[name].needs_hosts)
    return Plan(
        names=tuple(COSTS) if len(hosts) > 1 else one_level,
        groups=tuple(groups_of_hosts(hosts, effort) if len(hosts) > 1 else groups_of_one_host(size, effort)),
        seconds=effort.seconds,
        hosts=len(hosts),
        ranks_per_host=min(map(len, hosts)),
        cores=cores,
        all_cores=all_cores,
    )


def groups_of_one_host(size: int, effort: Effort) -> Iterator[Group]:
    """Sizes of groups to fit on, and others only to predict."""
    fitted = sorted({2, size // 2})
    for members in fitted:
        yield Group(ranks=tuple(range(members)), fitted=effort.fitted)
    for members in sorted({3, size} - {*fitted}):
        yield Group(ranks=tuple(range(members)), held_out=effort.held_out)


def groups_of_hosts(hosts: Sequence[tuple[int, ...]], effort: Effort) -> Iterator[Group]:
    """Two ranks of one host, and one rank on each of two: each pair has a level to itself, and the model is fitted to
    both. Larger groups, on one level or on both, it has to predict. Raises `UsageError` for hosts that are not alike.
    """
    first, node = hosts[0], min(map(len, hosts))
    size = node * len(hosts)
    if tuple(chain.from_iterable(hosts)) != tuple(range(size)) or {*map(len, hosts)} != {node}:
        counts = ", ".join(str(len(host)) for host in hosts)
        raise UsageError(
            f"hosts with {counts} ranks: measuring both levels takes as many ranks on each host, consecutive ones"
        )
    heads = tuple(host[0] for host in hosts)
    yield Group(ranks=heads[:2], fitted=effort.fitted_between, held_out=effort.held_out_between)
    if len(heads) > 2:
        yield Group(ranks=heads, held_out=effort.held_out_between)
    if node > 1:
        yield Group(ranks=first[:2], node=2, fitted=effort.fitted, held_out=effort.held_out)
        yield Group(ranks=tuple(range(size)), node=node, held_out=effort.held_out_between)
    if node > 2:
        yield Group(ranks=first, node=node, held_out=effort.held_out)


@dataclass(frozen=True)
class Point(Sample):
    """A measurement beside what the model predicts."""

    error: float
    """Relative error of the prediction: positive if it is too long, negative if too short."""
    fitted: bool
    """Whether the model was fitted to it; the others it has never seen."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Every algorithm's time for one size of tensor and one number of ranks."""

    size: int
    """Bytes of the tensor."""
    world_size: int
    winner: str
    """The fastest algorithm."""
    seconds: dict[str, float]
    """By algorithm."""


@dataclass(frozen=True, kw_only=True)
class ScaleResult:
    """The machine, how well the model describes it, and what it predicts."""

    parameters: Machine
    fit: Fields | None
    """How well the model describes what was measured: all `points`, and of the absolute errors of those that it was not
    fitted to, `median_error` and `worst_error`. None if the machine was given, and not measured."""
    plan: Plan | None
    """The measurements taken; None if the machine was given."""
    predictions: dict[str, list[Prediction] | None]
    """For all sizes and numbers of ranks: "host", with all ranks on one host's cores, None if none was measured, and
    "cluster", with every rank on cores and a link of its own."""


SIZES = [4 << 2 * step for step in range(15)]
"""Bytes: 4 B to 1 GiB."""
HOST = [2**power for power in range(1, 8)]
CLUSTER = [2**power for power in range(1, 17)]
"""Ranks: as many as one host takes, and up to 65,536."""


def seconds(machine: Machine, size: int, nbytes: int) -> dict[str, float]:
    """Time of each algorithm on `size` ranks for `nbytes`."""
    task = Task(size, nbytes, machine.ranks_per_node)
    return {name: machine.seconds(cost(task)) for name, cost in COSTS.items()}


def predictions(machine: Machine, ranks: Sequence[int]) -> list[Prediction]:
    """For all sizes, on all these numbers of ranks."""
    rows = []
    for nbytes, size in product(SIZES, ranks):
        times = seconds(machine, size, nbytes)
        rows.append(Prediction(size=nbytes, world_size=size, winner=min(times, key=times.__getitem__), seconds=times))
    return rows


def predict_cluster(machine: Machine) -> ScaleResult:
    """The predictions for a cluster that was not measured."""
    cluster = predictions(machine, CLUSTER)
    return ScaleResult(parameters=machine, fit=None, plan=None, predictions={"host": None, "cluster": cluster})


SWEEPS = 2000
"""Enough for five parameters to settle to their last digits, in a fraction of a second."""
REFITS = 10

Terms = tuple[float, float, float, float, float]
"""Factors of alpha, beta, gamma, and of alpha and beta inside a node: the sum of the products is a time."""


def evaluate(samples: Sequence[Sample], plan: Plan) -> ScaleResult:
    """The machine that the fitted samples describe, how well it predicts the others, and what it predicts."""
    machine = fit([sample for sample in samples if plan.is_fitted(sample)], plan)
    errors = [(sample, error(machine, sample, plan)) for sample in samples]
    points = [Point(**vars(sample), error=error, fitted=plan.is_fitted(sample)) for sample, error in errors]
    host = machine if plan.hosts == 1 else Machine(machine.inner_alpha, machine.inner_beta, machine.gamma, plan.cores)
    of_host = None if plan.ranks_per_host == 1 else predictions(host, HOST)
    found = {"host": of_host, "cluster": predictions(replace(machine, cores=None), CLUSTER)}
    unseen = [abs(point.error) for point in points if not point.fitted]
    quality = {"points": points, "median_error": median(unseen), "worst_error": max(unseen)}
    return ScaleResult(parameters=machine, fit=quality, plan=plan, predictions=found)


def samples_of(by_rank: Sequence[Mapping[Key, Sequence[float]]]) -> list[Sample]:
    """From every rank's seconds per call, round by round: what the slowest rank took, in the lower quartile of rounds.
    Not in the middle one, because all else that a machine does can only add to it."""
    samples = []
    for key in by_rank[0]:
        slowest = sorted(map(max, zip(*(times[key] for times in by_rank if key in times), strict=True)))
        name, size, nbytes, node = key
        samples.append(Sample(name, size, nbytes, slowest[len(slowest) // 4], node=node))
    return samples


def fit(samples: Sequence[Sample], plan: Plan) -> Machine:
    """The machine whose predictions have the smallest squared relative errors. Whether its path or its share of the
    total decides over an all-reduce depends on what is to be found. So: take the shares first (of several hosts the
    paths: no share depends on the link between them), fit, look again which decides, fit again; of all machines on the
    way, the best."""
    terms = [terms_of(sample, plan) for sample in samples]
    seconds = [sample.seconds for sample in samples]
    several = plan.hosts > 1
    decisive = [path if several else share for share, path in terms]
    cores, node = (None, plan.ranks_per_host) if several else (plan.cores, 1)
    seen = []
    for _ in range(REFITS):
        parameters = least_squares(decisive, seconds)
        alpha, beta, gamma, inner_alpha, inner_beta = parameters
        seen.append(Machine(alpha, beta, gamma, cores, node, inner_alpha, inner_beta))
        decisive = [max(both, key=lambda each: sum(map(mul, each, parameters))) for both in terms]
    return min(seen, key=lambda each: sum(error(each, sample, plan) ** 2 for sample in samples))


def terms_of(sample: Sample, plan: Plan) -> tuple[Terms, Terms]:
    """Each core's share of the total, and the critical path: the longer one decides. (Without shared cores, the path.)
    On several hosts it is the level inside a host that tells what a message costs a core."""
    cost = cost_of(sample)
    inside, between = cost.inside, cost.between
    path = (between.messages, between.bytes, between.added + inside.added, inside.messages, inside.bytes)
    cores = plan.cores_for(sample)
    if cores is None:
        return path, path
    share = cost.total.times(1 / cores)
    if plan.hosts > 1:
        return (0, 0, share.added, share.messages, share.bytes), path
    return (share.messages, share.bytes, share.added, 0, 0), path


def cost_of(sample: Sample) -> Cost:
    return COSTS[sample.algorithm](Task(sample.size, sample.nbytes, sample.node))


def error(machine: Machine, sample: Sample, plan: Plan) -> float:
    """Relative error of the prediction: positive if it is too long, negative if too short."""
    on_cores = replace(machine, cores=plan.cores_for(sample))
    return on_cores.seconds(cost_of(sample)) / sample.seconds - 1


def least_squares(terms: Sequence[Terms], seconds: Sequence[float]) -> list[float]:
    """The parameters, none below 0, that make each predicted / measured time as nearly 1 as can be; 0 for one that
    nothing depends on. That is, with the smallest sum of squared differences: one parameter after the other is set to
    its best value beside the others, again and again (coordinate descent)."""
    rows = [[term / second for term in each] for each, second in zip(terms, seconds, strict=True)]
    numbers = range(len(rows[0]))
    products = [[sum(row[i] * row[j] for row in rows) for j in numbers] for i in numbers]
    sums = [sum(row[i] for row in rows) for i in numbers]
    parameters = [0.0 for _ in numbers]
    for _ in range(SWEEPS):
        for i in (i for i in numbers if products[i][i]):
            others = sum(products[i][j] * parameters[j] for j in numbers if j != i)
            parameters[i] = max(0.0, (sums[i] - others) / products[i][i])
    return parameters
