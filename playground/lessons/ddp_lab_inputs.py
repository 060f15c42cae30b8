"""Which samples a rank gets under DistributedDataParallel, and what happens where one rank has fewer than others.

    python -m playground ddp --only uneven_inputs --only sampler -n 3

Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html and
https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.algorithms.join import Join
from torch.utils.data.distributed import DistributedSampler

from playground.lab.comm_hooks import Watch
from playground.lab.trainee import Lab, Trainee
from playground.runtime import PlaygroundError
from playground.runtime.agreement import everybodys
from playground.training.data import partition_dataset
from playground.training.replicas import largest_difference

BATCHES = 3
"""Of rank 0; every further rank has one more."""
SAMPLES = 10


def uneven_inputs(rank: int, size: int, lab: Lab) -> dict[str, Any]:
    """Rank r has 3 + r batches. Without Join the others would wait for ever for the rank that is done first; within it
    that rank answers with zeros until all are done, and then takes over the parameters of the last.

    {batches, steps, messages: all-reduces it took part in, difference: between replicas at the end, without_joining:
    {steps, says: what Join says if it is told to raise instead}}
    """
    batches, steps = BATCHES + rank, 0
    trainee = lab.trainee()
    watch = Watch(trainee.ddp)
    with Join([trainee.ddp]):
        for number in range(batches):
            trainee.step(number)
            steps += 1
    if difference := largest_difference(trainee.ddp.module):
        raise PlaygroundError(f"after Join replicas differ by up to {difference}: they must not at all")
    messages = len(watch.sent)
    return {
        "batches": batches, "steps": steps, "messages": messages, "difference": difference,
        "without_joining": stopped(lab.trainee(), batches),
    }  # fmt: skip


def stopped(trainee: Trainee, batches: int) -> dict[str, Any]:
    """As many steps as there are until the first rank is done, and what Join then says on this one."""
    steps, says = 0, None
    try:
        with Join([trainee.ddp], throw_on_early_termination=True):
            for number in range(batches):
                trainee.step(number)
                steps += 1
    except RuntimeError as error:
        says = str(error).splitlines()[0]
    everybodys(says)  # a failure of another kind would show here, at the ranks that are gone
    return {"steps": steps, "says": says}


def sampler(rank: int, size: int, lab: Lab) -> list[dict[str, Any]]:
    """Who gets which sample. DistributedSampler gives all ranks equally many: some samples twice, or, with drop_last,
    some to nobody. Every epoch has the same order, unless set_epoch tells it which one this is. Our partition_dataset
    gives each sample to one rank.

    A row a way: {way, mine: positions in order, doubled, left_out: positions}.
    """
    samples = range(SAMPLES + (SAMPLES % size == 0))  # a number that cannot be shared out evenly
    usual, told, dropping = (
        DistributedSampler(samples, seed=lab.settings.seed, drop_last=drop) for drop in (False, False, True)
    )
    ways = {f"no set_epoch, epoch {epoch}": list(usual) for epoch in range(2)}
    for epoch in range(2):
        told.set_epoch(epoch)
        ways[f"set_epoch({epoch})"] = list(told)
    ways["drop_last"] = list(dropping)
    ways["partition_dataset"] = list(partition_dataset(samples, size, lab.settings.seed).dataset.index)
    rows = []
    for way, mine in ways.items():
        counts = Counter(place for theirs in everybodys(mine) for place in theirs)
        doubled = [place for place in samples if counts[place] > 1]
        rows.append({"way": way, "mine": mine, "doubled": doubled, "left_out": [p for p in samples if not counts[p]]})
    return rows
