"""DistributedDataParallel taken apart: what it sends and when, and what each of its options changes.

    python -m playground ddp --lab

Whatever is compared starts from the same parameters and takes the same samples with the same dropout masks. Each part
is a file beside this one; parts.py lists them.
"""

from __future__ import annotations

from typing import Any

from playground.lessons.ddp.parts import PARTS
from playground.lessons.ddp.settings import LabSettings
from playground.runtime.agreement import require_same_on_all_ranks
from playground.runtime.steps import run_steps


def run_lab(rank: int, size: int, settings: LabSettings) -> list[Any]:
    """What this rank gets from each part, in order; {"refused": words} for what the backend cannot do.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    parts = [PARTS[name].code for name in settings.parts]
    return run_steps(rank, size, parts, settings.training.seed, (settings,))
