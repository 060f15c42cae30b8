"""Inside ranks: compare their clocks with rank 0's.

On a GPU a receive only orders what comes after it, and returns: a message has come when its value has been read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from playground.runtime import device
from playground.see.record.clocks import ClockSample

ROUNDS = 100
"""Of which the one with the shortest round trip counts: nothing was in its way."""
TAG = 20171


def compare_clocks(rank: int, ranks: list[int], clock: Callable[[], int], rounds: int = ROUNDS) -> ClockSample | None:
    """Compare the clocks of `ranks`, one after the other, with rank 0's. These, and rank 0, must call this.

    Returns what came of it for this rank; None on rank 0. Source: Cristian, Probabilistic clock synchronization (1989)
    """
    if rank:
        return ask(clock, rounds)
    for other in ranks:
        answer(other, clock, rounds)
    return None


def ask(clock: Callable[[], int], rounds: int) -> ClockSample:
    """Ask rank 0 for the time, again and again."""
    ping, pong = torch.zeros(2, 1, dtype=torch.int64, device=device())
    samples = []
    for _ in range(rounds):
        asked = clock()
        dist.send(ping, 0, tag=TAG)
        dist.recv(pong, 0, tag=TAG)
        theirs, answered = int(pong.item()), clock()
        middle = (asked + answered) // 2
        samples.append(ClockSample(at=middle, offset=theirs - middle, bound=(answered - asked + 1) // 2))
    return min(samples, key=lambda sample: sample.bound)


def answer(rank: int, clock: Callable[[], int], rounds: int) -> None:
    """Tell this rank the time, as often as it asks."""
    ping, pong = torch.zeros(2, 1, dtype=torch.int64, device=device())
    for _ in range(rounds):
        dist.recv(ping, rank, tag=TAG)
        ping.item()
        dist.send(pong.fill_(clock()), rank, tag=TAG)
