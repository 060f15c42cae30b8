"""Rules on what a model computes: what its loss is the mean of, what dropout drops, the running
statistics of BatchNorm, and whether the loss is reduced before backward (L1, E3, B1, M7). Does not
import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from playground.explain.right.averaging import Averaging, is_drifting
from playground.explain.right.facts import (
    BACKWARD,
    CALLED,
    FORWARD,
    IN_GRAPH,
    Event,
    Look,
    RankFacts,
)
from playground.explain.right.finding import HINT, Finding
from playground.explain.right.log import LEAST_LOOKS
from playground.explain.right.replicas import find_teams

UNEVEN = 1.25
"""Losses are means over different numbers of elements if one is this many times the other."""


def find_means(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """L1-means: the mean of the ranks' losses is the mean over all elements.

    A hint: in half of the steps that were looked at, and in three at least, each rank makes one
    backward pass from a mean of a loss function of torch's, over numbers of elements of which the
    largest is more than 1.25 times the smallest; and the ranks share a wrapped model. Unknown: the
    loss is scaled or composed, or its classes are weighted. Source: the documentation of
    `torch.nn.parallel.DistributedDataParallel`, which averages gradients over ranks.
    """
    for team in find_teams(facts):
        if not team.wrapped:
            continue
        counts = [
            [backward_of(look).size for look in looks.values()]
            for looks in team.looks
            if all(have_one_backward(look) for look in looks.values())
        ]
        uneven = [each for each in counts if min(each) and max(each) > UNEVEN * min(each)]
        if len(uneven) < LEAST_LOOKS or 2 * len(uneven) < len(team.looks):
            continue
        look = team.looks[-1][team.ranks[0]]
        told = " and ".join(str(each) for each in sorted({min(uneven[0]), max(uneven[0])}))
        yield Finding(
            rule="L1-means",
            level=HINT,
            what="the ranks average means over different numbers of elements",
            ranks=team.ranks,
            since=team.since,
            where=team.facts[0].where(backward_of(look).line),
            why=f"the losses of one step are means over {told} elements, and each counts the same: "
            "an element of a short batch weighs more",
            fix="divide the sum of each rank's losses by the number of elements of all ranks, and "
            "multiply by the number of ranks, over which the gradients are averaged",
        )


def have_one_backward(look: Look) -> bool:
    return look.is_whole and sum(each.kind == BACKWARD for each in look.events) == 1


def backward_of(look: Look) -> Event:
    """The last backward pass before a step that has one."""
    return [each for each in look.events if each.kind == BACKWARD][-1]


def find_equal_masks(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """E3-rng: dropout draws other masks on each rank.

    A hint: in all steps that were looked at, and in three at least, the random generators of the
    ranks are in one state before the forward pass of a wrapped model with dropout at work, and the
    inputs differ. Unknown: there is no module of `torch.nn` that drops; the inputs are equal, or
    not known. Source: the notes on reproducibility in the documentation of torch: a seed fixes what
    a generator draws.
    """
    for team in find_teams(facts):
        for model in team.facts[0].models:
            forwards = [
                [first_forward(look, model.key) for look in looks.values()] for looks in team.looks
            ]
            known = [each for each in forwards if all(each)]
            if len(known) < LEAST_LOOKS or not all(map(have_equal_masks, known)):
                continue
            line = next(event.line for event in known[-1] if event)
            yield Finding(
                rule="E3-rng",
                level=HINT,
                what="dropout draws the same masks on all ranks",
                ranks=team.ranks,
                since=team.since,
                where=team.facts[0].where(line),
                why="the random generators of the ranks are in the same state before each forward "
                "pass: all were given one seed, and draw the same numbers",
                fix="after the model is made, give each rank a seed of its own: "
                "torch.manual_seed(seed + rank)",
            )


def first_forward(look: Look, model: str) -> Event | None:
    found = [each for each in look.events if each.kind == FORWARD and each.subject == model]
    return found[0] if found else None


def have_equal_masks(forwards: Sequence[Event | None]) -> bool:
    seen = [each for each in forwards if each]
    states = {each.generator for each in seen}
    inputs = {tuple(each.prints) for each in seen}
    are_known = all(each.prints and None not in each.prints for each in seen)
    return len(states) == 1 and 0 not in states and are_known and len(inputs) > 1


def find_statistics(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """B1-bn: replicas have the same running statistics.

    A hint: in three steps the running means of a BatchNorm layer differ between ranks, while its
    weights are equal. Unknown: DistributedDataParallel broadcasts the buffers before each forward
    pass. Source: the documentation of `torch.nn.SyncBatchNorm`.
    """
    for team in find_teams(facts):
        found = [place for place in places_of_norms(team.looks) if differ(team.looks, place)]
        if found:
            yield Finding(
                rule="B1-bn",
                level=HINT,
                what=f"the running statistics of {len(found)} BatchNorm layer"
                f"{'s' if len(found) > 1 else ''} differ between replicas",
                ranks=team.ranks,
                since=team.since,
                where=team.facts[0].where(team.first.line),
                why="each rank computes them from its own batches: unless they are averaged before "
                "they are used, the model in evaluation depends on the rank",
                fix="use torch.nn.SyncBatchNorm, or average the buffers over the ranks before they "
                "are used",
            )


def places_of_norms(looks: Sequence[Mapping[int, Look]]) -> set[int]:
    return {place for each in looks for look in each.values() for place, _ in look.statistics}


def differ(looks: Sequence[Mapping[int, Look]], place: int) -> bool:
    """Whether the statistics differ at three looks, and the weights are equal at all of them."""
    known = [
        each for each in looks if all(dict(look.statistics).get(place) for look in each.values())
    ]
    apart = [
        each for each in known
        if len({dict(look.statistics)[place] for look in each.values()}) > 1
        and len({look.before[place] for look in each.values()}) == 1
    ]  # fmt: skip
    return len(apart) == len(known) >= LEAST_LOOKS


def find_reduced_loss(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """M7-loss: gradients are reduced after backward; to reduce the loss before it changes none.

    A hint: in two steps, on all ranks, `all_reduce` takes a tensor of one element that is in the
    graph, a backward pass follows, and no call takes gradients; all gradients differ, and the
    parameters were equal and drift. (An ensemble may print the mean of its losses so.) Unknown: as
    for all rules on averages by hand; no number is in the graph, as after `detach()`. Source: the
    documentation of `torch.distributed.all_reduce`, through which no gradient flows.
    """
    for team in find_teams(facts):
        if team.wrapped or team.has_threads or len(team.ranks) < len(facts):
            continue
        seen = Averaging(team, [team.replica(name) for name in team.first.optimizer.parameters])
        reduced = [
            calls for looks in team.looks
            if all(calls := [reductions_before_backward(look) for look in looks.values()])
        ]  # fmt: skip
        if len(reduced) < 2 or any(call.gradients for call in seen.calls) or seen.exchanges:
            continue
        if any(look.has_closure for look in team.all_looks):
            continue
        if not all(is_drifting(each) and seen.are_own(each) for each in seen.replicas):
            continue
        yield seen.finding(
            "M7-loss",
            seen.replicas,
            what="the replicas of a model drift apart",
            where=team.facts[0].where(reduced[0][0][-1].line),
            why="the loss is reduced before backward(), and gradients do not flow through "
            "all_reduce: each rank goes on with the gradients of its own loss",
            fix="call backward() on each rank's own loss, and average the gradients between "
            "backward() and step()",
            level=HINT,
        )


def reductions_before_backward(look: Look) -> list[Event]:
    """The calls of `all_reduce` that took a number of the graph, if a backward pass followed."""
    kinds = [each.kind for each in look.events]
    last = len(kinds) - 1 - kinds[::-1].index(BACKWARD) if BACKWARD in kinds else 0
    return [
        each for each in look.events[:last]
        if each.kind == CALLED and each.subject == "all_reduce" and each.note == IN_GRAPH
    ]  # fmt: skip
