"""Real runs: who is blamed for a rank that was slow."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from playground.algorithms import load_all_reduce
from playground.see.analyse.waits import Blamer, Waits
from playground.see.record import COLLECTIVE
from playground.see.record.run import record_run

DELAY, STRAGGLER, SIZE = 0.2, 2, 3
"""The delay is larger than what a busy machine does to a rank within an all-reduce."""
LAST = 1000
"""Elements of the last all-reduce, for which the straggler is late."""


def all_reduce_late(rank: int, size: int) -> None:
    """Several rings, of several sizes; before the last of them, when the others are there, one rank is late."""
    all_reduce, store = load_all_reduce("ring"), dist.distributed_c10d._get_default_store()
    for numel in (16, 4096, 65_536, LAST):
        dist.barrier()
        if numel == LAST and rank == STRAGGLER:
            store.wait([f"{other} is there" for other in range(size) if other != rank])
            time.sleep(DELAY)
        elif numel == LAST:
            store.set(f"{rank} is there", "")
        all_reduce(torch.ones(numel))


def test_the_rank_and_the_line_of_a_straggler_are_blamed() -> None:
    _, recording = record_run(all_reduce_late, SIZE)
    waits = Waits(recording)
    begun = {event.rank: event.start for event in recording.events(COLLECTIVE) if event.nbytes == 4 * LAST}
    in_last = [wait for wait in waits.all if wait.event.start >= begun[wait.event.rank]]
    longest = max(in_last, key=lambda wait: wait.late)
    chain = Blamer(waits).blame(longest)
    assert (chain.busy or chain.waits[-1].event).rank == STRAGGLER
    assert chain.busy is not None
    source = waits.timeline.source(chain.busy.event)
    assert source is not None
    assert source.function == "all_reduce_late"
    assert source.file.endswith("test_recorded_runs.py")
    assert chain.busy.seconds > DELAY / 2
