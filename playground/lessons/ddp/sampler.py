"""Which samples a rank gets: from torch's DistributedSampler, and from our partition_dataset.

    python -m playground ddp --only sampler -n 3

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from collections import Counter

from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.results import SamplerResult
from playground.lessons.ddp.settings import LabSettings
from playground.runtime.agreement import all_gather_object
from playground.training.data import partition_dataset

SAMPLES = 10


def sampler(rank: int, size: int, settings: LabSettings) -> list[SamplerResult]:
    """Who gets which sample. DistributedSampler gives all ranks equally many: some samples twice, or, with drop_last,
    some to nobody. Every epoch has the same order, unless set_epoch tells it which one this is. Our partition_dataset
    gives each sample to one rank.

    One result per way.
    """
    samples = range(SAMPLES + (SAMPLES % size == 0))  # a number that cannot be shared out evenly
    results = []
    for way, mine in share_out(samples, size, settings.training.seed).items():
        counts = Counter(place for theirs in all_gather_object(mine) for place in theirs)
        doubled = [place for place in samples if counts[place] > 1]
        left_out = [place for place in samples if not counts[place]]
        results.append(SamplerResult(way=way, mine=mine, doubled=doubled, left_out=left_out))
    return results


def share_out(samples: range, size: int, seed: int) -> dict[str, list[int]]:
    """The positions of this rank's samples, in order, for each way."""
    without_set_epoch, with_set_epoch, dropping = (
        DistributedSampler(samples, seed=seed, drop_last=drop_last) for drop_last in (False, False, True)
    )
    ways = {f"no set_epoch, epoch {epoch}": list(without_set_epoch) for epoch in range(2)}
    for epoch in range(2):
        with_set_epoch.set_epoch(epoch)
        ways[f"set_epoch({epoch})"] = list(with_set_epoch)
    ways["drop_last"] = list(dropping)
    ways["partition_dataset"] = list(partition_dataset(samples, size, seed).dataset.index)
    return ways
