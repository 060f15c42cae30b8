"""The model fitted to samples: latency, bandwidth and the speed of adding, how far it is from what
was held out, and its predictions. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from playground.algorithms.cost_model import Machine, Task
from playground.tools.scale.plan import COSTS, Plan
from playground.tools.scale.results import (
    CLUSTER,
    Fit,
    Point,
    Result,
    Sample,
    cores_for,
    predict,
)

SWEEPS = 2000
"""Enough for five parameters to settle to their last digits, in a fraction of a second."""

PARAMETERS = ("alpha", "beta", "gamma", "inner_alpha", "inner_beta")
"""Those of a machine that are fitted: its times are a sum of each, times a factor."""


def evaluate(samples: Sequence[Sample], plan: Plan) -> Result:
    """The machine that the fitted samples describe, how well, and its predictions."""
    machine = fit([sample for sample in samples if sample.fitted], plan)
    points = [Point(**vars(sample), error=error(machine, sample, plan)) for sample in samples]
    unseen = [abs(point.error) for point in points if not point.fitted]
    quality = Fit(points=points, median_error=median(unseen), worst_error=max(unseen))
    predictions = predict(replace(machine, cores=None), CLUSTER)
    return Result(parameters=machine, measured=plan, fit=quality, predictions=predictions)


def fit(samples: Sequence[Sample], plan: Plan) -> Machine:
    """The machine whose predictions have the smallest squared relative errors."""
    cores, node = (None, plan.ranks_per_host) if plan.hosts > 1 else (plan.cores, 1)
    machine = Machine(0, 0, cores=cores, ranks_per_node=node)
    units = [replace(machine, **{name: 1}) for name in PARAMETERS]
    factors = [[predict_sample(unit, sample, plan) for unit in units] for sample in samples]
    seconds = [sample.seconds for sample in samples]
    alpha, beta, gamma, inner_alpha, inner_beta = least_squares(factors, seconds)
    return Machine(alpha, beta, gamma, cores, node, inner_alpha, inner_beta)


def predict_sample(machine: Machine, sample: Sample, plan: Plan) -> float:
    """Seconds, on the cores that the sample's ranks share."""
    cost = COSTS[sample.algorithm](Task(sample.size, sample.nbytes, sample.node))
    return replace(machine, cores=cores_for(sample, plan)).seconds(cost)


def error(machine: Machine, sample: Sample, plan: Plan) -> float:
    """Relative error of the prediction: positive if it is too long, negative if too short."""
    return predict_sample(machine, sample, plan) / sample.seconds - 1


def least_squares(factors: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The parameters, none below 0, that make each predicted / measured time as nearly 1 as can be;
    0 for one that nothing depends on. That is, with the smallest sum of squared differences: one
    parameter after the other is set to its best value beside the others, again and again
    (coordinate descent)."""
    rows = [
        [factor / second for factor in each] for each, second in zip(factors, seconds, strict=True)
    ]
    numbers = range(len(rows[0]))
    products = [[sum(row[i] * row[j] for row in rows) for j in numbers] for i in numbers]
    sums = [sum(row[i] for row in rows) for i in numbers]
    parameters = [0.0 for _ in numbers]
    for _ in range(SWEEPS):
        for i in (i for i in numbers if products[i][i]):
            others = sum(products[i][j] * parameters[j] for j in numbers if j != i)
            parameters[i] = max(0.0, (sums[i] - others) / products[i][i])
    return parameters
