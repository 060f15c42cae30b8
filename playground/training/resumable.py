"""A training run that can be interrupted at any moment, and ends with the same bits.

All that a run is after a step goes into its snapshots: parameters, the optimizer's state, totals, and each rank's
random numbers. Who gets which sample when is not stored: it follows from the seed and from the position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.runtime import report, restart_count
from playground.training.history import History
from playground.training.snapshots.fingerprint import Fingerprint
from playground.training.snapshots.folder import SnapshotFile
from playground.training.snapshots.resume import choose_snapshot
from playground.training.snapshots.settings import SnapshotSettings
from playground.training.snapshots.snapshots import Snapshots, State, load
from playground.training.sync import GradSync


@dataclass(frozen=True)
class Position:
    """`step` steps of epoch `epoch` (from 1 on) are done, and `total` of all epochs."""

    epoch: int = 1
    step: int = 0
    total: int = 0


class UnsavedRun:
    """A training run that takes no snapshots, and begins at the start."""

    position = Position()

    def enter(self, epoch: int) -> int:
        """Begin an epoch, before anybody asks the loader for batches. Returns how many of its steps are done."""
        return 0

    def draw_as_before(self) -> None:
        """Let random numbers go on as they did, once. In the midst of an epoch: after the loader has drawn its own."""

    def advance(self, step: int, last: bool) -> None:
        """That step of the epoch is done. After the `last` one comes the test, and what is due is saved after that."""

    def end(self) -> None:
        """After the last epoch: take a snapshot of the end, and wait until all of them are written."""


class ResumableRun(UnsavedRun):
    """Takes snapshots of a training run, and puts it back where the last one was taken.

    `warm_up` computes gradients that nobody uses: after its first backward DistributedDataParallel rebuilds its
    buckets, and from then on adds in another order. A run that goes on must not add in that of the start.
    """

    def __init__(
        self,
        settings: SnapshotSettings,
        fingerprint: Fingerprint,
        sync: GradSync,
        optimizer: torch.optim.Optimizer,
        history: History,
        warm_up: Callable[[], object],
    ) -> None:
        self.settings, self.sync, self.optimizer, self.history = settings, sync, optimizer, history
        self.random_numbers: torch.Tensor | None = None
        """To go on with, until they do."""
        self.is_due = False
        rank, size = dist.get_rank(), dist.get_world_size()
        newest = agree_on_snapshot(settings, fingerprint)
        self.snapshots = Snapshots(settings.folder, fingerprint, rank=rank, size=size, keep=settings.keep)
        self.problem = ""
        if newest:
            warm_up()
            self.restore(load(newest, rank))
            report(resumed=asdict(self.position))

    def restore(self, state: State) -> None:
        """Be where the run was when it took this snapshot."""
        own: Mapping[str, Any] = {**state.shared, **state.own}
        self.position = Position(**own["position"])
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self.optimizer.zero_grad()
        self.history.restore(own["history"])
        self.sync.go_on_from(self.position.total)
        self.random_numbers = own["random_numbers"]

    @property
    def model(self) -> nn.Module:
        """The model itself, whatever it is wrapped in."""
        model: nn.Module = getattr(self.sync.model, "module", self.sync.model)
        return model

    def enter(self, epoch: int) -> int:
        if epoch > self.position.epoch:
            self.position = Position(epoch, 0, self.position.total)
        if self.position.step == 0:
            self.draw_as_before()
        if self.is_due:
            self.save()
        return self.position.step

    def draw_as_before(self) -> None:
        if self.random_numbers is not None:
            torch.set_rng_state(self.random_numbers)
            self.random_numbers = None

    def advance(self, step: int, last: bool) -> None:
        self.position = Position(self.position.epoch, step, self.position.total + 1)
        self.is_due = self.is_due or self.position.total % self.settings.every == 0
        if self.is_due and not last:
            self.save()

    def save(self) -> None:
        """Take a snapshot here."""
        self.is_due = False
        whole = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        own = {
            "position": asdict(self.position), "history": self.history.state(),
            "random_numbers": torch.get_rng_state(),
        }  # fmt: skip
        state = State(own=own, shared=whole) if self.sync.keeps_replicas_equal else State(own={**own, **whole})
        self.snapshots.save(self.position.total, state)
        self.tell_problem()

    def tell_problem(self) -> None:
        """Report why a snapshot could not be written, once: training goes on."""
        if self.snapshots.problem != self.problem:
            self.problem = self.snapshots.problem
            report(notice=self.problem)

    def end(self) -> None:
        if self.position.epoch == len(self.history.finished):  # else it went on beyond the last epoch, and took no step
            self.position = Position(self.position.epoch + 1, 0, self.position.total)
            self.save()
        self.snapshots.close()
        self.tell_problem()


def open_run(
    snapshots: SnapshotSettings | None,
    identify: Callable[[], Fingerprint],
    sync: GradSync,
    optimizer: torch.optim.Optimizer,
    history: History,
    warm_up: Callable[[], object],
) -> UnsavedRun:
    """The run that is asked for, at its start or where it goes on. `identify` says what it must have in common with a
    snapshot to go on from that."""
    if snapshots is None:
        return UnsavedRun()
    return ResumableRun(snapshots, identify(), sync, optimizer, history, warm_up)


def agree_on_snapshot(settings: SnapshotSettings, fingerprint: Fingerprint) -> SnapshotFile | None:
    """The snapshot that rank 0 chooses, on every rank."""
    chosen: list[SnapshotFile | None] = [None]
    if dist.get_rank() == 0:
        restarted = restart_count() > 0
        size = dist.get_world_size()
        chosen = [choose_snapshot(settings, fingerprint, size, restarted, lambda line: report(notice=line))]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]
