"""A rule on the samples of the ranks of a model (S5, S10). Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from playground.explain.right.facts import RankFacts, Samples
from playground.explain.right.finding import HINT, Finding
from playground.explain.right.replicas import find_teams

DISTINCT = 0.99
"""The least part of a rank's samples that are different ones: others may be drawn repeatedly."""
SOME, ALL = 0.02, 0.98
"""Parts of a rank's samples: so many are not equal by chance; so many are all."""


def find_shared_samples(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """S5-whole and S10-overlap: in one pass, the ranks of a wrapped model train on different
    samples.

    A hint: ranks have the same samples, or some of the same, in the first pass in training that all
    of them have told, over data loaders without a `DistributedSampler`. Samples are compared by
    their content. Unknown: an `IterableDataset`; a rank has a sample repeatedly (it may draw with
    replacement); all ranks have one order (E1-batches). To draw at random on each rank, from all
    samples, is right if that is meant: a pass is then no epoch. Source: the documentation of
    `torch.utils.data.distributed.DistributedSampler`.
    """
    told: set[tuple[int, ...]] = set()
    for team in find_teams(facts):
        if not team.wrapped or team.ranks in told:
            continue
        passes = [{each.number: each for each in rank.samples} for rank in team.facts]
        common = sorted(set.intersection(*({*each} for each in passes)))
        ranks = [each[number] for number in common[:1] for each in passes]
        if not ranks or any(repeats(each) for each in ranks):
            continue
        if all(each.prints == ranks[0].prints for each in ranks):
            continue
        shared = max(share(one, other) for one, other in combinations(ranks, 2))
        if shared < SOME:
            continue
        told.add(team.ranks)
        is_all = shared > ALL and all(each.is_whole for each in ranks)
        part = "all samples" if is_all else f"{shared:.0%} of a rank's first samples"
        yield Finding(
            rule="S5-whole" if is_all else "S10-overlap",
            level=HINT,
            what="in one pass, several ranks of a model that DistributedDataParallel wraps train "
            f"on the same samples: {part}",
            ranks=team.ranks,
            since=0,
            where=team.facts[0].where(ranks[0].line),
            why="the data loaders have no DistributedSampler, and each rank goes through the "
            "samples in an order of its own",
            fix="give the DataLoader a DistributedSampler, or let the ranks agree on one order of "
            "the samples before each takes its part",
        )


def repeats(samples: Samples) -> bool:
    return len({*samples.prints}) < DISTINCT * len(samples.prints)


def share(one: Samples, other: Samples) -> float:
    """The part of the samples of one rank that another has, too."""
    both = {*one.prints} & {*other.prints}
    return len(both) / min(len(one.prints), len(other.prints))
