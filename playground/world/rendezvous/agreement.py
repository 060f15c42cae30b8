"""Exchange objects between the ranks of a world, and require that settings are the same on all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from playground.base.errors import UsageError


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. All must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_same_on_all_ranks(settings: Mapping[str, object]) -> None:
    """Raise `UsageError` unless every rank was given the same settings. All must call this.

    On several hosts each rank has its own command line: work with settings that differ would be
    wrong.
    """
    all_settings = all_gather_object(settings)
    for name in dict.fromkeys(name for each in all_settings for name in each):
        values = [each.get(name, "not there") for each in all_settings]
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                raise UsageError(
                    f"{name} is {values[0]} on rank 0 and {theirs} on rank {rank}: it must be the "
                    "same"
                )
