"""The rules, and what they find in the facts of all ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from playground.explain.right import Finding, Level, RankFacts
from playground.explain.right.averaging import find_averaging
from playground.explain.right.calls import find_misuses
from playground.explain.right.clipping import find_clipped
from playground.explain.right.data import RULES as DATA
from playground.explain.right.drift import find_drifts
from playground.explain.right.files import find_early_load, find_shared_file
from playground.explain.right.models import RULES as MODELS
from playground.explain.right.optimizers import RULES as OPTIMIZERS
from playground.explain.right.samples import find_shared_samples
from playground.explain.right.sharding import RULES as SHARDING

RULES: Sequence[Callable[[Sequence[RankFacts]], Iterator[Finding]]] = (
    find_drifts,
    find_averaging,
    find_clipped,
    *DATA,
    *OPTIMIZERS,
    *MODELS,
    *SHARDING,
    find_shared_samples,
    find_shared_file,
    find_early_load,
    find_misuses,
)

TOLD_AT_THE_END = {"D2-nosync-last", "D4-later", "D7-inback", "M6-reduce"}
"""Rules that rest on something that did not happen, and that a later step may do: to bring replicas
together that train apart for a while."""


def find_mistakes(facts: Sequence[RankFacts]) -> list[Finding]:
    """What is wrong, the certain first, then the probable, each by the step since which it is."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda each: ([*Level].index(each.level), each.since, each.rule))
