"""Findings in words. Does not import torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from playground.base.ranks import name_ranks
from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import Finding

WIDTH = 80


def tell(finding: Finding) -> str:
    """What, on which ranks, since when, why and where, and what to do."""
    since = f", since step {finding.since}" if finding.since >= 0 else ""
    where = f" ({finding.where})" if finding.where else ""
    sentences = (
        f"playground: {finding.level.value} [{finding.rule}]: {finding.what} "
        f"({name_ranks(finding.ranks)}{since}).",
        f"Why: {finding.why}{where}.",
        f"To fix it: {finding.fix}.",
    )
    return "\n".join(textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in sentences)


def tell_all(findings: Sequence[Finding], facts: Sequence[RankFacts]) -> str:
    """All findings; if there is none, what was looked at and what is unknown."""
    if findings:
        return "\n\n".join(map(tell, findings))
    steps = sum(len(each.looks) for each in facts)
    seen = f"{steps} steps of optimizers were compared" if steps else "no optimizer made a step"
    return "\n".join(
        textwrap.fill(each, WIDTH)
        for each in (
            f"playground: nothing wrong was seen: {seen}",
            *(f"not known: {each}" for each in explain_unknown(facts)),
        )
    )


def explain_unknown(facts: Sequence[RankFacts]) -> list[str]:
    """What is not known of ranks, and why."""
    found = [
        f"rank {each.rank}: {each.unknown or 'its log is full, and has the first steps'}"
        for each in facts
        if each.unknown or each.is_full
    ]
    threads = [each.rank for each in facts if each.has_threads]
    if threads:
        found.append(f"what other threads than the main one do ({name_ranks(threads)})")
    return found
