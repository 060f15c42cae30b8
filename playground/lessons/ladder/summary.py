"""Replicas timed in turn, and from the seconds of every rank, round and part of a step to the figures of each rung. All
ranks must take part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random

import torch

from playground.lessons.ladder.messages import Messages
from playground.lessons.ladder.results import PARTS, RungResult, StepParts
from playground.lessons.ladder.timed_replica import TimedReplica
from playground.measurement.interleave import interleave
from playground.runtime import device
from playground.runtime.backends import backend_of
from playground.training.replicas import all_gather_stacked, flat, largest_difference


def time_in_turn(
    replicas: Sequence[TimedReplica],
    step: Callable[[TimedReplica], list[float]],
    rounds: Iterable[object],
    seed: int,
    warm_up: int,
) -> torch.Tensor:
    """Let every replica take a step and average alone, once in each of `rounds`, and time both.

    Returns [rank, replica, round, `PARTS` and then averaging alone], float64, the same on every rank, without the first
    `warm_up` rounds.
    """
    calls = [call for replica in replicas for call in (partial(step, replica), replica.average_alone)]
    timed = interleave(calls, rounds, Random(seed))  # the same order on every rank
    steps, alone = (torch.tensor(each, dtype=torch.float64, device=device()) for each in (timed[::2], timed[1::2]))
    return all_gather_stacked(torch.cat([steps, alone], dim=-1)[:, warm_up:]).cpu()


def summarize(
    replicas: Sequence[TimedReplica], messages: Sequence[Messages], seconds: torch.Tensor
) -> list[RungResult]:
    """Of each replica, in order; the last is the one in DistributedDataParallel.

    `seconds` are those of `time_in_turn`.
    """
    steps = seconds[..., : len(PARTS)].sum(-1).amax(0)  # [replica, round], on the slowest rank
    p50, p95 = (steps.quantile(quantile, dim=1).tolist() for quantile in (0.5, 0.95))
    results = []
    for number, (replica, counted) in enumerate(zip(replicas, messages, strict=True)):
        parts = parts_of_last(seconds[:, number, :, : len(PARTS)])
        alone = seconds[:, number, :, -1].amin(0).quantile(0.5).item()
        number_sent, bytes_sent, early_bytes = most_of_all_ranks(counted)
        loss, difference_to_ddp = compare_outcomes(replica, replicas[-1])
        results.append(
            RungResult(
                rung=replica.name,
                p50=p50[number],
                p95=p95[number],
                forward=parts.forward,
                backward=parts.backward,
                exposed=parts.exposed,
                step=parts.step,
                alone=alone,
                hidden=max(0.0, 1 - parts.exposed / alone) if early_bytes else 0.0,
                messages=number_sent,
                bytes=bytes_sent,
                early_bytes=early_bytes,
                loss=loss,
                difference_to_ddp=difference_to_ddp,
                replicas_max_difference=largest_difference(replica.model),
                speed_to_first=p50[0] / p50[number],
                speed_to_ddp=p50[-1] / p50[number],
                caveat=backend_of().describe_overlap() if replica is replicas[-1] else "",
            )
        )
    return results


def most_of_all_ranks(messages: Messages) -> tuple[int, int, int]:
    """How many messages, of how many bytes, and how many of them early, the rank sends that sends most."""
    mine = torch.tensor([len(messages.sizes), sum(messages.sizes), messages.early], device=device())
    number, sent, early = all_gather_stacked(mine).amax(0).tolist()
    return number, sent, early


def parts_of_last(seconds: torch.Tensor) -> StepParts:
    """Medians over all rounds of the parts on the rank that came last to the averaging, and so waited for the shortest
    time there. `seconds` [rank, round, `PARTS`]."""
    last = seconds[..., PARTS.index("exposed")].argmin(0)
    return step_parts(seconds[last, range(len(last))])


def parts_by_rank(replicas: Sequence[TimedReplica], seconds: torch.Tensor) -> list[dict[str, StepParts]]:
    """For each rank, the medians over all rounds of the parts of each replica's steps there."""
    return [
        {replica.name: step_parts(its[:, : len(PARTS)]) for replica, its in zip(replicas, mine, strict=True)}
        for mine in seconds
    ]


def step_parts(seconds: torch.Tensor) -> StepParts:
    """Medians over all rounds: `seconds` [round, `PARTS`]."""
    return StepParts(**dict(zip(PARTS, seconds.quantile(0.5, dim=0).tolist(), strict=True)))


def compare_outcomes(replica: TimedReplica, ddp: TimedReplica) -> tuple[float, float]:
    """The mean loss of the last batch, and the largest difference of any parameter to DistributedDataParallel's.

    That is rounding, 1e-8, since sums in another order are rounded differently. Over many steps rounding now and then
    decides which of two numbers a ReLU or max_pool lets through: 1e-4. (In float64 all agree to 1e-16.)
    """
    difference = (flat(replica.model.parameters()) - flat(ddp.model.parameters())).abs().max().double()
    of_ranks = all_gather_stacked(torch.stack([torch.full_like(difference, replica.loss), difference]))
    return of_ranks[:, 0].mean().item(), of_ranks[:, 1].max().item()
