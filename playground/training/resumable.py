"""A training run that can be interrupted at any moment, and ends with the same bits.

All that a run is after a step goes into its snapshots: parameters, the optimizer's state, totals, and each rank's
random numbers. Who gets which sample when is not stored: it follows from the seed and from the position.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from playground.runtime import PlaygroundError, Preempted, UsageError, device, preempted, report
from playground.runtime.backends import backend_of
from playground.runtime.meeting.agreement import all_gather_object
from playground.survival.fingerprint import Fingerprint
from playground.survival.folder import SnapshotFile, remove_marker
from playground.survival.hosts import agree_on_snapshot, find_sharers, load_states, open_snapshots
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import State
from playground.training.sync import GradSync

INTERVAL = 0.5
"""Seconds from one appointment to the next, about."""


@dataclass(frozen=True)
class Agreement:
    """The decision of all ranks after the step at which they met."""

    save: bool = False
    """Take a snapshot: it is time."""
    signal: int = 0
    """Take one and end: some rank was asked to, by the signal of this number. 0: none was."""


class Appointments:
    """One rank's diary. The ranks of a world have entered the same in theirs, whatever their clocks say. `step` is the
    number of steps done when it begins, and `seconds`, if not None, the time between two snapshots."""

    def __init__(self, step: int, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.next_step = step + 1
        self.last_step, self.last_time = step, time.monotonic()
        self.saved_at = self.last_time

    def keep(self, step: int, at_once: bool = False) -> Agreement:
        """Called after each step, by all ranks: if there is an appointment now, agree. Rank 0's clock counts.
        `at_once`: there is one now, because something has taken time that is no step."""
        if step < self.next_step and not at_once:
            return Agreement()
        now = time.monotonic()
        save = now - self.saved_at >= self.seconds
        if save:
            self.saved_at = now
        # Steps until the next appointment, if they take as long as those since the last one.
        seconds = min(INTERVAL, max(0.0, self.saved_at + self.seconds - now))
        ahead = max(1, int(seconds * (step - self.last_step) / max(now - self.last_time, 1e-9)))
        proposal = [int(save), ahead] if dist.get_rank() == 0 else [0, 0]
        agreed = torch.tensor([*proposal, preempted() or 0], device=device())
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        due, ahead, signal = agreed.tolist()
        self.last_step, self.last_time, self.next_step = step, now, step + ahead
        return Agreement(save=bool(due), signal=signal)


def redistribute(states: Sequence[State], rank: int, snapshot: SnapshotFile, combine: Callable[..., Any]) -> State:
    """The state that rank `rank` resumes from; `combine` is that of its `RunHistory`. Only random numbers are its own:
    a new rank gets a seed that follows from the run, its own seed included, and that no other rank and no other step
    has, for every kind of device."""
    owns: list[Mapping[str, Any]] = [state.own for state in states]
    own = {**owns[min(rank, snapshot.size - 1)], "history": combine([each["history"] for each in owns])}
    if rank >= snapshot.size:
        digest = hashlib.sha256(json.dumps([snapshot.fingerprint, rank, snapshot.step]).encode()).digest()
        seed = int.from_bytes(digest[:8], "little", signed=True)
        own["random_numbers"] = dict.fromkeys(own["random_numbers"], seed)
    return State(shared=states[0].shared, own=own)


DRAWS_FROM: Mapping[str, Any] = {"cpu": torch, "cuda": torch.cuda}
"""Where the random numbers for each kind of device come from."""


@dataclass(frozen=True)
class Position:
    """`step` steps of epoch `epoch` (from 1 on) are done, and `total` of all epochs."""

    epoch: int = 1
    step: int = 0
    total: int = 0


class RunHistory(Protocol):
    """The counts of a training loop."""

    @property
    def finished(self) -> Sized:
        """The epochs that are done, each with its test; always empty where it is steps alone that are counted."""

    def state(self) -> Mapping[str, object]:
        """The counts so far: tensors and plain data."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""

    def combine(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The counts that this rank continues from, when a different number of ranks has counted `states`."""


class UnsavedRun:
    """A training run that takes no snapshots, and begins at the start."""

    position = Position()

    def enter(self, epoch: int) -> int:
        """Begin an epoch, before anybody asks the loader for batches. Returns how many of its steps are done. Raises
        `Preempted` as `advance` does."""
        return 0

    def draw_as_before(self) -> None:
        """Let random numbers go on as they did, once. In the midst of an epoch: after the loader has drawn its own."""

    def advance(self, step: int, last: bool) -> None:
        """That step of the epoch is done. After the `last` one comes the test, and what is due is saved after that.
        Raises `Preempted`, on all ranks, when they have agreed to end here and their snapshot is written."""

    def end(self) -> None:
        """After the last epoch: take a snapshot of the end, and wait until all of them are written."""


class ResumableRun(UnsavedRun):
    """Takes snapshots of a training run, and puts it back where the last one was taken.

    `warm_up` computes gradients that are discarded: after its first backward DistributedDataParallel rebuilds its
    buckets, and from then on adds in another order. A run that goes on must not add in that of the start.
    """

    def __init__(
        self,
        settings: SnapshotSettings,
        fingerprint: Fingerprint,
        sync: GradSync,
        optimizer: torch.optim.Optimizer,
        history: RunHistory,
        warm_up: Callable[[], object],
    ) -> None:
        self.settings, self.sync, self.optimizer, self.history = settings, sync, optimizer, history
        self.random_numbers: Mapping[str, torch.Tensor | int] = {}
        """To go on with, until they do: by kind of device the state of the generator, or a seed."""
        self.is_due = False
        self.asked_by = 0
        """The number of the signal by which the ranks are asked to end; 0 if they are not."""
        self.saved: Position | None = None
        """Where the newest snapshot was taken."""
        backend_of().use_deterministic_kernels()
        fingerprint = {**fingerprint, "device": device().type}
        size = dist.get_world_size()
        sharers = find_sharers(settings.folder)
        newest = agree_on_snapshot(settings, fingerprint, sharers)
        if newest and newest.snapshot.size != size and not sync.keeps_replicas_equal:
            taken, folder = newest.snapshot.size, newest.snapshot.folder
            raise UsageError(
                f"snapshot {folder} was taken by {taken}, and the ranks here are {size}: with --sync-every, parameters "
                f"are each rank's own, and there are none for another number: take -n {taken}, or another folder"
            )
        self.snapshots = open_snapshots(settings, fingerprint, sharers)
        self.problem = ""
        if newest:
            warm_up()
            self.go_on_from(newest.snapshot, load_states(newest, sharers))
        remove_marker(settings.folder)
        self.appointments = Appointments(self.position.total, settings.seconds)

    def go_on_from(self, snapshot: SnapshotFile, states: Sequence[State]) -> None:
        """Be where the run was when its ranks took this snapshot, though there were more or fewer of them."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == snapshot.size:
            self.restore(states[rank])
        else:
            self.restore(redistribute(states, rank, snapshot, self.history.combine))
            if not snapshot.fingerprint.get("logical_ranks"):
                epoch, step = self.position.epoch, snapshot.step
                notice = (
                    f"going on with {size} rank{'s' * (size > 1)} from step {step}, which {snapshot.size} took: "
                    f"parameters, optimizer and position are exact;\n"
                    f"which samples the rest of epoch {epoch} takes, dropout masks and rounding differ (not with "
                    f"--logical-ranks)"
                )
                report(notice=notice)
        report(resumed=asdict(self.position))

    def restore(self, state: State) -> None:
        """Be where the run was when it took this snapshot."""
        own: Mapping[str, Any] = {**state.shared, **state.own}
        self.position = self.saved = Position(**own["position"])
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
            self.meet(at_once=True)  # the test may have taken long
        if self.position.step == 0:
            self.draw_as_before()
        self.save_if_due()
        return self.position.step

    def draw_as_before(self) -> None:
        for kind, state in self.random_numbers.items():
            draws = DRAWS_FROM[kind]
            draws.manual_seed(state) if isinstance(state, int) else draws.set_rng_state(state)
        self.random_numbers = {}

    def advance(self, step: int, last: bool) -> None:
        self.position = Position(self.position.epoch, step, self.position.total + 1)
        by_steps = self.settings.seconds is None and self.position.total % self.settings.every == 0
        self.is_due = self.is_due or by_steps
        self.meet()
        if not last:
            self.save_if_due()

    def meet(self, at_once: bool = False) -> None:
        """Where the ranks have an appointment: agree on whether to take a snapshot, and whether to end after it."""
        agreed = self.appointments.keep(self.position.total, at_once)
        self.asked_by = self.asked_by or agreed.signal
        self.is_due = self.is_due or agreed.save or self.asked_by > 0

    def save_if_due(self) -> None:
        """Take a snapshot if it is time for one; if the ranks are to end, they do it here."""
        if self.is_due:
            self.save()
        if self.asked_by:
            self.leave()

    def save(self) -> None:
        """Take a snapshot here."""
        self.is_due, self.saved = False, self.position
        whole = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        kinds = ("cpu", device().type)
        own = {
            "position": asdict(self.position), "history": self.history.state(),
            "random_numbers": {kind: of.get_rng_state() for kind, of in DRAWS_FROM.items() if kind in kinds},
        }  # fmt: skip
        state = State(own=own, shared=whole) if self.sync.keeps_replicas_equal else State(own={**own, **whole})
        self.snapshots.save(self.position.total, state)
        self.tell_problem()

    def tell_problem(self) -> None:
        """Report why a snapshot could not be written, once: training goes on."""
        if self.snapshots.problem != self.problem:
            self.problem = self.snapshots.problem
            report(problem=self.problem)

    def leave(self) -> NoReturn:
        """End here, as all ranks have agreed, when what was saved is on the disk: of all of them, or it is no use."""
        self.snapshots.close()
        self.tell_problem()
        name, step = signal.Signals(self.asked_by).name, self.position.total
        if any(all_gather_object(self.snapshots.problem and self.snapshots.written != step)):
            raise PlaygroundError(f"{name} came after step {step}, and its snapshot could not be written")
        raise Preempted(name, step)

    def end(self) -> None:
        if self.position.epoch == len(self.history.finished):  # else it went on beyond the last epoch, and took no step
            self.position = Position(self.position.epoch + 1, 0, self.position.total)
        if self.position != self.saved:
            self.save()
        self.snapshots.close()
        self.tell_problem()


def open_run(
    snapshots: SnapshotSettings | None,
    identify: Callable[[], Fingerprint],
    sync: GradSync,
    optimizer: torch.optim.Optimizer,
    history: RunHistory,
    warm_up: Callable[[], object],
) -> UnsavedRun:
    """The run that is asked for, at its start or where it goes on. `identify` says what it must have in common with a
    snapshot to go on from that."""
    if snapshots is None:
        return UnsavedRun()
    return ResumableRun(snapshots, identify(), sync, optimizer, history, warm_up)
