"""The rules, and what they find in the facts of all ranks. Does not import torch.

Four mistakes have no rule, since no right program would be safe from it, or each would pay for it:

- A tensor that is read while an asynchronous call writes it: only a dispatch mode sees reads, and
  it would see each operator of the program. That nobody waits for the call is told (A3).
- A matrix that stages of a pipeline share, and whose gradients nobody adds up: the stages have
  other parameters, and nothing says which of them are one.
- Calls that are not as many on all ranks: a run that fails or hangs is explained by its launcher,
  with the first call in which the ranks differ, or the deadlock.
- A file that several ranks write by `open`: only an audit hook sees it, which stays for good, and
  is called for each import and each `exec`, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import Finding, Level

TOLD_AT_THE_END = {"D2-nosync-last", "D4-later", "D7-inback", "M6-reduce"}
"""Rules that rest on something that did not happen, and that a later step may do: to bring replicas
together that train apart for a while."""


def find_mistakes(facts: Sequence[RankFacts]) -> list[Finding]:
    """What is wrong, the certain first, then the probable, each by the step since which it is."""
    if not any(each.has_events for each in facts):
        return []
    # not for a program that trains nothing: there are many rules
    from playground.explain.right.every_rule import RULES
    from playground.explain.right.replicas import AllFacts

    compared = AllFacts(facts)
    found = [finding for rule in RULES for finding in rule(compared)]
    return sorted(found, key=lambda each: ([*Level].index(each.level), each.since, each.rule))
