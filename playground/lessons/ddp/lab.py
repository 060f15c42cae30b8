"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab

Whatever is compared starts from the same parameters and takes the same samples with the same dropout masks. Each part
is a file beside this one; parts.py lists them.
"""

from __future__ import annotations

from typing import Any

import torch

from playground.lessons.ddp.parts import PARTS
from playground.lessons.ddp.settings import LabSettings
from playground.runtime import report, steps
from playground.runtime.agreement import require_same_on_all_ranks


def run_lab(rank: int, size: int, settings: LabSettings) -> list[Any]:
    """What this rank gets from each part, in order; {"refused": words} for what the backend cannot do.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    torch.manual_seed(settings.training.seed)
    outcomes = []
    for number, name in enumerate(settings.parts):
        report(phase=f"the lab: {name}", step=number, steps=len(settings.parts))
        outcomes.append(steps.attempt(PARTS[name].code, rank, size, settings))
    return outcomes
