"""Findings in words. Does not import torch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from playground.base.ranks import name_ranks
from playground.base.wrapping import WIDTH
from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import Finding
from playground.explain.right.log import FAILED
from playground.ui.units import plural


def tell(finding: Finding, *, is_told: bool = False) -> str:
    """What, on which ranks, since when, why and where, and what to do; the first sentence alone of
    what is told already."""
    since = f", since step {finding.since}" if finding.since >= 0 else ""
    if finding.equal_at >= 0:
        since = f", first seen at step {finding.since}, equal at step {finding.equal_at}"
    where = f" ({finding.where})" if finding.where else ""
    sentences = (
        f"playground: {finding.level.value} [{finding.rule}]: {finding.what} "
        f"({name_ranks(finding.ranks)}{since}).",
        f"Why: {finding.why}{where}.",
        f"To fix it: {finding.fix}.",
    )
    shown = (f"{sentences[0]} See above.",) if is_told else sentences
    return "\n".join(textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in shown)


NEVER_SEEN = (
    "what is printed or logged, but for sums over one rank's samples that the script's text shows; "
    "how large the loss is"
)
DIVIDED = "parameters that are divided among ranks"
NOTHING_SEEN = (
    "no collective, no message, no model in DistributedDataParallel, and no step of an optimizer "
    "was"
)
HIDING = "replicas that drift apart hide other mistakes: run it again when this is fixed"


def tell_all(
    findings: Sequence[Finding],
    facts: Sequence[RankFacts] = (),
    is_told: Callable[[Finding], bool] = lambda finding: False,
    *,
    has_failed: bool = False,
) -> str:
    """All findings, those shorter that are told already; with the facts, also what was looked at
    and what was not. `has_failed`: whether a failure has ended the run."""
    parts = [tell(each, is_told=is_told(each)) for each in findings]
    if not parts:
        parts = [textwrap.fill(f"playground: {say_nothing_wrong(facts, has_failed)}", WIDTH)]
    if any(each.rule.startswith("D") and not is_told(each) for each in findings):
        parts.append(textwrap.fill(f"playground: {HIDING}.", WIDTH))
    if facts and (findings or any(each.has_calls or each.has_events for each in facts)):
        looks = "\n".join(textwrap.fill(each, WIDTH) for each in say_looks(facts))
        parts = [*parts[:-1], f"{parts[-1]}\n{looks}"] if not findings else [*parts, looks]
    return "\n\n".join(parts)


def say_nothing_wrong(facts: Sequence[RankFacts], has_failed: bool) -> str:
    """What was seen, where nothing wrong was."""
    nothing = f"{'until the failure, ' if has_failed else ''}no silent mistake was seen"
    if any(each.looks for each in facts):
        but = f", but for {DIVIDED}" if count_divided(facts) else ""
        return f"{nothing}: {count_steps(facts)} were compared{but}"
    if any(each.has_calls or each.has_events for each in facts):
        return f"{nothing}: no optimizer made a step"
    failed = [each.rank for each in facts if each.state == FAILED]
    before = f" before {name_ranks(failed)} failed" if failed else ""
    return "; ".join([f"nothing was checked: {NOTHING_SEEN} seen{before}", *explain_unknown(facts)])


def say_looks(facts: Sequence[RankFacts]) -> Iterator[str]:
    """What was looked at on all ranks together, and what was not."""
    counts = count_looks(
        steps=count_steps(facts),
        models=max(len(each.models) for each in facts),
        passes=sum(len(each.draws) for each in facts),
        files=sum(len(each.files) for each in facts),
    )
    yield f"looked at: {', '.join(counts)}"
    parts = [*explain_unknown(facts), NEVER_SEEN]
    if count := count_divided(facts):
        parts.insert(0, f"what becomes of the {DIVIDED} ({plural(count, 'DTensor')})")
    yield f"not looked at: {'; '.join(parts)}"


def count_divided(facts: Sequence[RankFacts]) -> int:
    """How many parameters of optimizers are divided among ranks."""
    return max((len(find_divided(each)) for each in facts), default=0)


def find_divided(rank: RankFacts) -> set[tuple[int, int]]:
    """The parameters of a rank that are, by the optimizer's number and their place there."""
    optimizers = {look.optimizer.number: look.optimizer for look in rank.looks}
    return {
        (number, place)
        for number, optimizer in optimizers.items()
        for place, shard in enumerate(optimizer.shards)
        if shard and shard[0]
    }


def count_steps(facts: Sequence[RankFacts]) -> str:
    """The number of steps that were looked at, of those that were made if these are more and all
    are known."""
    seen = sum(len(each.looks) for each in facts)
    made = sum(len(steps) for each in facts for steps in each.steps.values())
    if made > seen and all(each.has_all_steps for each in facts):
        return f"{seen:,} of {plural(made, 'step')} of optimizers"
    return f"{plural(seen, 'step')} of optimizers"


def count_looks(steps: int | str, models: int, passes: int, files: int) -> list[str]:
    """Numbers of what was looked at, in words. `steps` may be in words already; `passes` are
    iterations over a `DistributedSampler`."""
    return [
        steps if isinstance(steps, str) else f"{plural(steps, 'step')} of optimizers",
        plural(models, "model") + " in DistributedDataParallel",
        plural(passes, "iteration") + " over a DistributedSampler",
        plural(files, "file"),
    ]


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
