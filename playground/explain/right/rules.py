"""The rules, and what they find in the facts of all ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from playground.explain.right import Finding, RankFacts
from playground.explain.right.averaging import find_averaging
from playground.explain.right.calls import find_misuses
from playground.explain.right.data import RULES as DATA
from playground.explain.right.drift import find_drifts

RULES: Sequence[Callable[[Sequence[RankFacts]], Iterator[Finding]]] = (
    find_drifts,
    find_averaging,
    *DATA,
    find_misuses,
)


def find_mistakes(facts: Sequence[RankFacts]) -> list[Finding]:
    """What is wrong, the certain first, each by the step since which it is."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda each: (not each.is_certain, each.since, each.rule))
