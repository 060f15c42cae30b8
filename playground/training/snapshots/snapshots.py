"""Snapshots as a rank of a training run takes them: it waits for a copy in memory, and a thread writes that.

snapshots = Snapshots(folder, fingerprint, rank=rank, size=size)
snapshots.save(step, State(shared={"model": model.state_dict()}, own={"rng": torch.get_rng_state()}))
…
snapshots.close()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from playground.training.files import NO_ROOM
from playground.training.snapshots.buffers import Buffers
from playground.training.snapshots.disk import make_folder, make_subfolder, sync_folder, write_atomically
from playground.training.snapshots.fingerprint import Fingerprint, to_plain
from playground.training.snapshots.folder import WHOLE, SnapshotFile, examine, prune, step_folder
from playground.training.snapshots.manifest import SHARED, Manifest, encode, manifest_file, rank_file


@dataclass(frozen=True, kw_only=True)
class State:
    """All that a run needs to go on: tensors, numbers, strings, and dicts, lists and tuples of them."""

    shared: Mapping[str, object] = field(default_factory=dict)
    """What is the same on all ranks (model, optimizer): rank 0 writes its own, the others' is not looked at."""
    own: Mapping[str, object] = field(default_factory=dict)
    """What is this rank's alone: its random numbers, its totals; parameters, where replicas differ."""


class Snapshots:
    """The snapshots that one rank of a run takes. Every rank has one and saves at the same steps.

    All ranks write into `folder`, which they share. It belongs to one run: two at a time would remove each other's.
    Raises `UsageError` if it cannot be written to.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, *, rank: int, size: int, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep}: it must be at least 1")
        make_folder(folder)
        self.folder, self.fingerprint = folder, to_plain(fingerprint)
        self.rank, self.size, self.keep = rank, size, keep
        self.problem = ""
        """Why the last save that failed has failed, in one line; empty if none has."""
        self.written: int | None = None
        """The newest step whose part of this rank lies on the disk."""
        self.seconds_waited = 0.0
        """What calls of `save` have spent waiting for the save before."""
        self.buffers = Buffers()
        self.writer: threading.Thread | None = None
        self.bug: Exception | None = None

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(self, step: int, state: State) -> None:
        """Copy `state`, have a thread write it, and return; training may change the tensors then.

        If the save before is not written yet, wait for it: there is memory for one copy, and if a rank left steps out
        that others save, no snapshot might ever be whole. A disk that is full raises nothing: see `problem`.
        """
        started = time.perf_counter()
        self.wait()
        self.seconds_waited += time.perf_counter() - started
        parts = {rank_file(self.rank): state.own}
        if self.rank == 0:
            parts[SHARED] = state.shared
        copies = self.buffers.fill(parts)
        self.writer = threading.Thread(target=self._write, args=(step, copies), name=f"snapshot of step {step}")
        self.writer.start()

    def wait(self) -> None:
        """Return when all that was saved lies on the disk, or has failed: see `problem`."""
        if self.writer:
            self.writer.join()
            self.writer = None
        if self.bug:
            bug, self.bug = self.bug, None
            raise bug

    def close(self) -> None:
        """Wait for what is being written, and let go of the memory."""
        self.wait()
        self.buffers = Buffers()

    def _write(self, step: int, parts: Mapping[str, object]) -> None:
        try:
            self._write_parts(step, parts)
            self.written = step
            self._remove_old(step)
        except OSError as error:
            done = self.written == step
            what = f"snapshots before step {step} were not removed" if done else f"step {step} has no snapshot"
            self.problem = f"{what}: {describe(self.folder, error)}; training went on"
        except Exception as error:  # raised in the training's own thread
            self.bug = error

    def _write_parts(self, step: int, parts: Mapping[str, object]) -> None:
        folder = step_folder(self.folder, step)
        make_subfolder(folder)
        for name, part in parts.items():
            self._write_part(step, folder / name, part)
        sync_folder(folder)

    def _write_part(self, step: int, file: Path, part: object) -> None:
        written = write_atomically(file, partial(torch.save, part))
        manifest = Manifest(
            step=step,
            size=self.size,
            nbytes=written.nbytes,
            sha256=written.digest.hexdigest(),
            written=time.time(),
            fingerprint=self.fingerprint,
        )
        write_atomically(manifest_file(file), lambda stream: stream.write(encode(manifest)))

    def _remove_old(self, step: int) -> None:
        """The rank whose part was the last removes what is too old: whole, now, is what all ranks have written."""
        if examine(self.folder, step, read_contents=False).condition == WHOLE:
            sync_folder(step_folder(self.folder, step))  # another rank's names might not lie on the disk yet
            prune(self.folder, step, self.keep)


def describe(folder: Path, error: OSError) -> str:
    """What is wrong with the folder of snapshots."""
    what = f"there is no room in {folder}" if error.errno in NO_ROOM else f"{folder} cannot be written to"
    return f"{what} ({error.strerror})"


def load(snapshot: SnapshotFile, rank: int) -> State:
    """What `snapshot` holds for this rank, on the CPU. Nothing in it is run, as a pickle's code would be.

    `own` is empty for a rank that the run had not.
    """
    own = load_part(snapshot.folder / rank_file(rank)) if rank < snapshot.size else {}
    return State(shared=load_part(snapshot.folder / SHARED), own=own)


def load_part(file: Path) -> dict[str, object]:
    part: dict[str, object] = torch.load(file, map_location="cpu", weights_only=True)
    return part
