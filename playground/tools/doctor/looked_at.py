"""What the runs of a script have shown to the checks, and what they have not: nothing is said of
what was not looked at. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playground.explain.right.facts import RankFacts
from playground.explain.right.report import count_looks, explain_unknown
from playground.ui.units import plural


@dataclass(frozen=True, kw_only=True)
class LookedAt:
    """What was looked at in one run, on all ranks together."""

    size: int
    """Number of ranks."""
    calls: int
    """Operations of torch.distributed, also those that it calls itself."""
    steps: int
    """Steps of optimizers that were compared."""
    models: int
    """Models that DistributedDataParallel wraps, on the rank with the most."""
    passes: int
    """Iterations over a `DistributedSampler`."""
    files: int
    """Files that `torch.save` has written or `torch.load` has read."""
    trains_apart: bool = False
    """Whether ranks train, and nothing has averaged gradients or parameters."""
    unknown: Sequence[str]
    """What was not looked at."""


def describe_looks(
    facts: Sequence[RankFacts], size: int, calls: int, stopped_after: float
) -> LookedAt:
    """What `size` ranks have shown. `stopped_after`: the seconds after which they were stopped; 0
    if they have ended by themselves."""
    from playground.explain.right.averaging import train_apart  # as a script that runs needs it

    steps = sum(len(each.looks) for each in facts)
    models = max((len(each.models) for each in facts), default=0)
    unknown = [
        *([f"what comes after the first {stopped_after:g} s"] if stopped_after else []),
        *(["training, as no optimizer of torch.optim made a step"] if not steps else []),
        *explain_unknown(facts),
    ]
    return LookedAt(
        size=size, calls=calls, steps=steps, models=models,
        passes=sum(len(each.draws) for each in facts),
        files=sum(len(each.files) for each in facts),
        trains_apart=train_apart(facts),
        unknown=unknown,
    )  # fmt: skip


def say_looks(seen: Sequence[LookedAt]) -> Iterator[str]:
    """Lines on what was looked at in the runs together, and what was not, with the run if it is one
    of several."""
    counts = [
        plural(sum(each.calls for each in seen), "call"),
        *count_looks(
            steps=sum(each.steps for each in seen),
            models=max(each.models for each in seen),
            passes=sum(each.passes for each in seen),
            files=sum(each.files for each in seen),
        ),
    ]
    sizes = " and on ".join(f"{run.size} ranks" for run in seen)
    yield f"  looked at, on {sizes}: {', '.join(counts)}"
    unknown = [
        f"{each} (on {run.size} ranks)" if len(seen) > 1 else each
        for run in seen
        for each in run.unknown
        if not all(each in other.unknown for other in seen)
    ]
    unknown += (each for each in seen[0].unknown if all(each in run.unknown for run in seen))
    yield f"  not looked at: {'; '.join([*unknown, 'other backends and devices than those used'])}"
