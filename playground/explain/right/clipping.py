"""A rule on gradients that are clipped before they are averaged by hand (M8). Does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from playground.explain.right.facts import CALLED, Event, Look, RankFacts
from playground.explain.right.finding import HINT, Finding
from playground.explain.right.log import LEAST_COMPARED
from playground.explain.right.replicas import find_teams

SLACK = 1e-3
"""Factors that differ by less than this are equal."""


def find_clipped(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """M8-clip: gradients are clipped after they have been averaged.

    A hint: in two steps, each rank has multiplied all its gradients by one factor between backward
    and the call that averages them; no factor is above 1, and they differ between ranks. Unknown: a
    call takes several gradients, or a buffer. Weights of ranks, as for batches of different sizes,
    have the same sum in all steps. Source: the documentation of
    `torch.nn.utils.clip_grad_norm_`, whose norm is that of the gradients it is given.
    """
    for team in find_teams(facts):
        if team.wrapped or team.has_threads or len(team.ranks) < len(facts):
            continue
        known = [
            [factor for look in looks.values() if (factor := factor_of(look)) is not None]
            for looks in team.looks
        ]
        scaled = [each for each in known if len(each) == len(team.ranks)]
        clipped = [
            each for each in scaled if max(each) <= 1 + SLACK and max(each) - min(each) > SLACK
        ]
        sums = [sum(each) for each in scaled]
        if len(clipped) < LEAST_COMPARED or max(sums) - min(sums) <= SLACK:
            continue
        first, second, *_ = clipped[0]
        call = next(call for look in team.all_looks for call in averaging_calls(look))
        yield Finding(
            rule="M8-clip",
            level=HINT,
            what="gradients are scaled on each rank before they are averaged",
            ranks=team.ranks,
            since=team.since,
            where=team.facts[0].where(call.line),
            why="between backward and the average each rank multiplies its gradients by a factor "
            f"of its own, such as {first:.2g} and {second:.2g}: this bounds the "
            "norm of a rank's gradient, and not that of the mean",
            fix="average the gradients, then clip them",
        )


def factor_of(look: Look) -> float | None:
    """By what all gradients were multiplied between backward and the call that takes them; None if
    there is no such number, or it is not known."""
    factors = [
        after / before
        for call in averaging_calls(look)
        for place in call.gradients
        if place < len(look.raw_values)
        for before, after in zip(look.raw_values[place], call.values, strict=False)
        if before
    ]
    if not factors or min(factors) <= 0 or max(factors) - min(factors) > SLACK * max(factors):
        return None
    return factors[0]


def averaging_calls(look: Look) -> list[Event]:
    return [
        each
        for each in look.events
        if each.kind == CALLED and each.subject == "all_reduce" and len(each.gradients) == 1
    ]
