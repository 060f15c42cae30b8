"""Latency, bandwidth and the speed of adding, fitted to measurements, and how far the model is from those held out.

The ranks of one host share its cores, and the model has one level. On several hosts it has two: what a message costs
inside a host, and what it costs between hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from playground.algorithms.cost_model import Cost, Machine, Task
from playground.tools.scale.plan import (
    CLUSTER,
    COSTS,
    HOST,
    Key,
    Plan,
    Point,
    Predictions,
    Sample,
    ScaleResult,
    fit_of,
    predictions,
)

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
    found = Predictions(host=of_host, cluster=predictions(replace(machine, cores=None), CLUSTER))
    return ScaleResult(parameters=machine, fit=fit_of(points), plan=plan, predictions=found)


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
        decisive = [max(both, key=lambda each: dot(each, parameters)) for both in terms]
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


def dot(terms: Terms, parameters: Sequence[float]) -> float:
    return sum(term * parameter for term, parameter in zip(terms, parameters, strict=True))
