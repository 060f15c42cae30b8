"""A training run that can be interrupted at any moment, and ends with the same bits.

A snapshot holds all that a run is after a step: parameters, the optimizer's state, totals, and each
rank's random numbers, as on the board of elastic. Who gets which sample when is not stored: it
follows from seed and position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.checkpoint.folder import SnapshotSettings
from playground.checkpoint.snapshots import (
    Fingerprint,
    Snapshot,
    deserialise,
    open_folder,
    serialise,
)
from playground.runtime import PlaygroundError, Preempted, device, preempted, report
from playground.runtime.backends import backend_of
from playground.runtime.rendezvous.agreement import all_gather_object
from playground.training.history import History
from playground.training.sync import GradSync

INTERVAL = 0.5
"""Seconds from one vote on whether to end to the next, about."""
DRAWS_FROM: Mapping[str, Any] = {"cpu": torch, "cuda": torch.cuda}
"""Where the random numbers for each kind of device come from."""


@dataclass(frozen=True)
class Position:
    """`step` steps of epoch `epoch` (from 1 on) are done, and `total` of all epochs."""

    epoch: int = 1
    step: int = 0
    total: int = 0


class ResumableRun:
    """Takes snapshots of a training run, and puts it back where the last one was taken; without
    `settings`, neither.

    `identify` says what the run must share with a snapshot to resume from it. `warm_up` computes
    gradients that are discarded: after its first backward DistributedDataParallel rebuilds its
    buckets, and from then on adds in another order. A run that resumes must not add in that of the
    start.
    """

    def __init__(
        self, settings: SnapshotSettings | None, identify: Callable[[], Fingerprint],
        sync: GradSync,
        optimizer: torch.optim.Optimizer, history: History, warm_up: Callable[[], object],
    ) -> None:  # fmt: skip
        self.settings = settings
        self.sync = sync
        self.optimizer = optimizer
        self.history = history
        self.model: nn.Module = getattr(sync.model, "module", sync.model)
        self.position = Position()
        self.saved: Position | None = None  # where the newest snapshot was taken
        self.random_numbers: Mapping[str, torch.Tensor | int] = {}
        """To go on with, until they do: by kind of device the state of the generator, or a seed."""
        # to take a snapshot; and to end after it, as the ranks have agreed
        self.is_due = False
        self.is_asked = False
        if settings:
            backend_of().use_deterministic_kernels()
            self.fingerprint = {**identify(), "device": device().type}
            # parameters are each rank's own: there are none for another number
            if not sync.keeps_replicas_equal:
                self.fingerprint["ranks"] = dist.get_world_size()
            self.writer, newest = open_folder(settings, self.fingerprint)
            if newest:
                warm_up()
                self.resume(newest)
            self.next_vote = self.position.total + 1
            self.last_vote = (self.position.total, time.monotonic())

    def resume(self, snapshot: Snapshot) -> None:
        """Be where the run was when its ranks took this snapshot, though there were more or fewer
        of them."""
        rank, size, before = dist.get_rank(), dist.get_world_size(), len(snapshot.own)
        own = snapshot.own[rank] if size == before else redistribute(snapshot, rank)
        state: Mapping[str, Any] = {**snapshot.shared, **own}
        self.position = self.saved = Position(**state["position"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.zero_grad()
        self.history.restore(state["history"])
        self.sync.go_on_from(self.position.total)
        self.random_numbers = state["random_numbers"]
        if size != before:
            exact = (
                "parameters, optimizer and position are exact; samples, dropout masks and "
                "rounding differ"
            )
            report(
                notice=f"{before} ranks took the snapshot of step {snapshot.step}, {size} resume: "
                f"{exact}"
            )
        report(resumed=asdict(self.position))

    def enter(self, epoch: int) -> int:
        """Begin an epoch, before the loader is asked for batches. Returns how many of its steps are
        done. May raise `Preempted`."""
        if epoch > self.position.epoch:
            self.position = Position(epoch, 0, self.position.total)
        if self.position.step == 0:
            self.draw_as_before()
        self.save_if_due()
        return self.position.step

    def draw_as_before(self) -> None:
        """Let random numbers go on as they did, once. In the midst of an epoch: after the loader
        has drawn its own."""
        for kind, state in self.random_numbers.items():
            draws = DRAWS_FROM[kind]
            draws.manual_seed(state) if isinstance(state, int) else draws.set_rng_state(state)
        self.random_numbers = {}

    def advance(self, step: int, last: bool) -> None:
        """That step of the epoch is done. After the `last` one comes the test, and what is due is
        saved after that. Raises `Preempted`, on all ranks, when they have agreed to end here and
        the snapshot is written."""
        self.position = Position(self.position.epoch, step, self.position.total + 1)
        if self.settings:
            self.is_asked = self.vote() or self.is_asked
            self.is_due = (
                self.is_due or self.is_asked or self.position.total % self.settings.every == 0
            )
        if not last:
            self.save_if_due()

    def vote(self) -> bool:
        """Whether any rank has been asked to end, if the ranks vote after this step: they do so at
        the same steps, by rank 0's clock. If only the one that was asked left, the others would
        wait for it."""
        step, now = self.position.total, time.monotonic()
        if step < self.next_vote:
            return False
        steps, seconds = step - self.last_vote[0], now - self.last_vote[1]
        ahead = max(1, int(INTERVAL * steps / max(seconds, 1e-9))) if dist.get_rank() == 0 else 0
        votes = torch.tensor([ahead, int(preempted())], device=device())
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        ahead, asked = votes.tolist()
        self.next_vote = step + ahead
        self.last_vote = (step, now)
        return bool(asked)

    def save_if_due(self) -> None:
        """Take a snapshot if it is time for one; if the ranks are to end, they do it here."""
        if self.is_due:
            self.save()
        if self.is_asked:
            if self.writer:
                self.writer.close()
            step = self.position.total
            if any(all_gather_object(bool(self.writer and self.writer.written != step))):
                raise PlaygroundError(
                    f"SIGTERM came after step {step}, and its snapshot could not be written"
                )
            raise Preempted(step)

    def save(self) -> None:
        """Take a snapshot here: rank 0 gathers what each rank has of its own, and writes."""
        self.is_due = False
        self.saved = self.position
        shared = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        random_numbers = {kind: DRAWS_FROM[kind].get_rng_state() for kind in ("cpu", device().type)}
        own = {"history": self.history.state(), "random_numbers": random_numbers}
        if not self.sync.keeps_replicas_equal:
            own, shared = {**own, **shared}, {}
        shared["position"] = asdict(self.position)
        gathered, step = all_gather_object(serialise(own)), self.position.total
        if self.writer:
            owns = [deserialise(each) for each in gathered]
            self.writer.save(
                Snapshot(step=step, fingerprint=self.fingerprint, shared=shared, own=owns)
            )

    def end(self) -> None:
        """After the last epoch: take a snapshot of the end, and wait until all of them are
        written."""
        if self.settings:
            # else it was beyond the last epoch: it took no step
            if self.position.epoch == len(self.history.finished):
                self.position = Position(self.position.epoch + 1, 0, self.position.total)
            if self.position != self.saved:
                self.save()
            if self.writer:
                self.writer.close()


def redistribute(snapshot: Snapshot, rank: int) -> Mapping[str, Any]:
    """The state from which rank `rank` resumes as its own, when a different number of ranks took
    the snapshot. A new rank gets a seed for every kind of device that follows from the run, and
    that no other rank and no other step has."""
    own = {**snapshot.own[min(rank, len(snapshot.own) - 1)]}
    # rank 0 has the counts of all
    total = torch.stack([each["history"]["total"] for each in snapshot.own]).sum(0)
    own["history"] = {**own["history"], "total": total if rank == 0 else torch.zeros_like(total)}
    if rank >= len(snapshot.own):
        # by the hash of the string
        seed = Random(f"{snapshot.fingerprint} {rank} {snapshot.step}").getrandbits(63)
        own["random_numbers"] = dict.fromkeys(own["random_numbers"], seed)
    return own
