"""Which start of the world this is, at a store that outlives them: torchrun's.

torchrun tells each rank how often it has restarted, but each host counts by itself: when a rank fails, the host it is
on counts a restart, while another host may see only that somebody waits for a new round, which it does not count
(pytorch/pytorch#108158). So rank 0 gives every start a number that the store has not seen, and tells the others.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

POLL = 0.01
"""Seconds between two looks of rank 0 for ranks that have come."""


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout: timedelta) -> tuple[int, bool]:
    """The number of this start of the world, the same on every rank, and whether, as far as this rank knows, everyone
    has come. All must call this.

    Raises torch's errors: `DistNetworkError` if the store goes, another `RuntimeError` if rank 0 does not come in time.
    """
    return number_attempt(store, size, timeout) if rank == 0 else (await_number(store, rank, timeout), True)


def await_number(store: dist.Store, rank: int, timeout: timedelta) -> int:
    """Tell rank 0 that this process has come. What an earlier one has said of itself in this place is overwritten, and
    nobody else gets the answer."""
    process = uuid.uuid4().hex
    store.set(f"rank {rank} waits", process)
    store.add("have waited", 1)
    store.wait([f"attempt of {process}"], timeout)
    attempt = int(store.get(f"attempt of {process}"))
    store.add(f"members of attempt {attempt}", 1)
    return attempt


def number_attempt(store: dist.Store, size: int, timeout: timedelta) -> tuple[int, bool]:
    """Answer whoever waits until all others know the number. A process that is gone may have left its word: it is
    answered too, and so is the one that comes after it."""
    attempt, answered, counted = store.add("attempts", 1), set[str](), -1
    end = time.monotonic() + timeout.total_seconds()
    while store.add(f"members of attempt {attempt}", 0) < size - 1:
        if time.monotonic() > end:
            return attempt, False
        if (have_waited := store.add("have waited", 0)) == counted:
            time.sleep(POLL)
            continue
        counted = have_waited
        for rank in (rank for rank in range(1, size) if store.check([f"rank {rank} waits"])):
            process = store.get(f"rank {rank} waits").decode()
            if process not in answered:
                answered.add(process)
                store.set(f"attempt of {process}", str(attempt))
    return attempt, True
