"""In a rank: sees which samples it draws, and the batches that it gets of them."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Subset

from playground.base.upstream import count_batches, count_collectives, count_workers, sampler_of
from playground.explain.right.fingerprint import find_fingerprint, find_row_fingerprints
from playground.explain.right.log import BATCH, DRAW, SAMPLES, SHARES, Prints
from playground.explain.right.watcher import Notes, Watcher, guarded, tensors_in

MOST_DRAWS = 32
"""How many iterations over a sampler are told."""
MOST_WORKERS = 16
"""With more workers, their batches are not looked at."""
FIRST_BATCHES = 2
"""How many batches of such an iteration are looked at."""
MOST_PASSES, MOST_SAMPLES = 4, 2048
"""How many passes over other samplers are told, and how many samples of each."""


@dataclass
class Pass:
    """A pass over a data loader."""

    batches: int
    """How many are left."""
    prints: list[int] = field(default_factory=list)
    is_told: bool = False


class DataWatcher(Watcher):
    """Sees samplers and data loaders."""

    looks_at_training = True

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        self.samplers: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The numbers of samplers, and of their last draws."""
        self.known = 0
        """How many samplers were seen, also those that are gone."""
        self.loaded: dict[int, int] = {}
        """How many batches came of the last draw, by the sampler's number."""
        self.has_loader = False
        self.shares: WeakKeyDictionary[Any, list[Prints]] = WeakKeyDictionary()
        """The first batches of iterators over an `IterableDataset` with several workers."""
        self.told_shares = 0
        """How many of these were told."""
        self.passes: WeakKeyDictionary[Any, Pass] = WeakKeyDictionary()
        """Those of training that are not over a `DistributedSampler`, by their iterators."""
        self.told_passes = 0
        """How many of these were told."""

    @guarded
    def samples_drawn(self, sampler: Any) -> None:
        number, draw = self.samplers.get(sampler, (self.known, -1))
        if draw < 0:
            self.known += 1
        self.samplers[sampler] = number, draw + 1
        self.loaded[number] = 0
        if draw + 1 < MOST_DRAWS:
            counted = count_collectives(dist.group.WORLD) if dist.is_initialized() else None
            self.notes.log.tell(
                DRAW, number, draw + 1, sampler.rank, sampler.num_replicas, sampler.seed,
                sampler.epoch, bool(sampler.shuffle), len(sampler.dataset), sampler.total_size,
                print_of_choice(sampler.dataset),
                -1 if counted is None else counted,
                [*self.notes.count_steps().items()],
                self.notes.write_line(),
            )  # fmt: skip

    @guarded
    def batch_loaded(self, iterator: Any, batch: Any) -> None:
        if not self.has_loader:
            self.has_loader = True
            self.notes.log.tell(BATCH)
        self.find_shares(iterator, batch)
        sampler = sampler_of(iterator)
        if not isinstance(sampler, DistributedSampler):
            self.find_samples(iterator, batch)
        if sampler not in self.samplers:
            return
        number, draw = self.samplers[sampler]
        self.loaded[number] += 1
        if self.loaded[number] <= FIRST_BATCHES and draw < MOST_DRAWS:
            prints = [find_fingerprint(each) for each in tensors_in(batch)]
            trains = torch.is_grad_enabled()
            self.notes.log.tell(BATCH, number, draw, self.loaded[number] - 1, prints, trains)

    def find_shares(self, iterator: Any, batch: Any) -> None:
        """Tell the first two batches of each worker that goes through an `IterableDataset`."""
        workers = count_workers(iterator)
        if workers < 2 or workers > MOST_WORKERS or self.told_shares >= MOST_DRAWS:
            return
        seen = self.shares.setdefault(iterator, [])
        if len(seen) < 2 * workers:
            seen.append([find_fingerprint(each) for each in tensors_in(batch)])
            if len(seen) == 2 * workers:
                self.told_shares += 1
                self.notes.log.tell(SHARES, workers, seen, self.notes.write_line())

    def find_samples(self, iterator: Any, batch: Any) -> None:
        """Tell the samples of a pass, when they are known or are enough."""
        if self.told_passes >= MOST_PASSES or not torch.is_grad_enabled():
            return
        seen = self.passes.setdefault(iterator, Pass(count_batches(iterator)))
        if seen.is_told or seen.batches <= 0:
            return
        seen.batches -= 1
        rows = find_row_fingerprints(next(iter(tensors_in(batch)), None))
        if rows is None:
            seen.batches = 0
            return
        seen.prints += rows
        if not seen.batches or len(seen.prints) >= MOST_SAMPLES:
            prints, line = seen.prints[:MOST_SAMPLES], self.notes.write_line()
            is_whole = not seen.batches and len(prints) == len(seen.prints)
            self.notes.log.tell(SAMPLES, self.told_passes, prints, is_whole, line)
            self.told_passes += 1
            seen.is_told = True


def print_of_choice(data: Any) -> int:
    """The fingerprint of the samples that a `Subset` has chosen; 0 of any other data set."""
    if not isinstance(data, Subset):
        return 0
    return zlib.crc32(array("q", map(int, data.indices)).tobytes()) or 1
