"""Snapshots of a training run: how rank 0 writes them, and how the ranks choose one to resume
from."""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.checkpoint.folder import (
    NAME,
    SnapshotSettings,
    find_snapshots,
    lock_folder,
    make_folder,
    name_file,
    write_snapshot,
)
from playground.runtime import UsageError, report
from playground.runtime.rendezvous.agreement import all_gather_object, refuse_together

Fingerprint = Mapping[str, object]
"""The settings that two runs must share for one to resume where the other ended; plain data."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a run needs to resume: tensors and plain data. Its fields are what `torch.load`
    finds in a file."""

    step: int
    fingerprint: Fingerprint
    shared: Mapping[str, Any]
    """The state that is the same on all ranks: model, optimizer."""
    own: Sequence[Mapping[str, Any]]
    """The state of each rank's own, in rank order: random numbers, totals; parameters, where
    replicas differ."""


class SnapshotWriter:
    """Writes a run's snapshots, on rank 0, by a thread. Raises `UsageError` if another run is
    writing in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unlock = weakref.finalize(self, os.close, lock_folder(folder))
        self.written: int | None = None
        """The newest step whose snapshot lies on the disk."""
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self.writing: Future[None] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Serialise it, have the thread write it, and return; tensors may be changed then. If the
        one before is not written yet, wait for it. That a disk is full is reported, and raises
        nothing."""
        content = serialise(vars(snapshot))
        if self.writing:
            self.writing.result()
        self.writing = self.thread.submit(self.write, snapshot.step, content)

    def write(self, step: int, content: bytes) -> None:
        try:
            write_snapshot(self.folder, step, content)
            self.written = step
        except OSError as error:
            why = f"{self.folder} cannot be written to ({error.strerror})"
            report(problem=f"step {step} has no snapshot: {why}; training went on")

    def close(self) -> None:
        """Wait until all is written. Raises what the thread has raised, lest the last snapshot be
        missed by nobody."""
        self.thread.shutdown()
        self.unlock()
        if self.writing:
            self.writing.result()


def serialise(value: object) -> bytes:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # torch.save would wait for the GPU with the GIL held
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def deserialise(content: bytes) -> Any:
    """The argument of `serialise`, on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_snapshot(file: Path) -> Snapshot:
    """Raises `ValueError` for a file that is damaged."""
    try:
        if not file.is_file():  # a FIFO would be waited for, a device may have no end
            raise ValueError("it is not a regular file")
        content, name = file.read_bytes(), NAME.fullmatch(file.name)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    if not name or name_file(int(name[1]), content) != file.name:
        raise ValueError("its checksum is not that in its name")
    return Snapshot(**deserialise(content))


def choose_snapshot(folder: Path, fingerprint: Fingerprint) -> Snapshot | None:
    """The snapshot to resume from; None to begin at the start. Those that are damaged are named in
    reports and passed over. Raises `UsageError` if it is of another run."""
    for _, file in find_snapshots(folder):
        try:
            snapshot = read_snapshot(file)
        except ValueError as error:
            report(notice=f"snapshot {file.name} is damaged, {error}: looking for one before it")
            continue
        check_same_run(file, snapshot.fingerprint, fingerprint)
        return snapshot
    return None


def check_same_run(file: Path, saved: Fingerprint, own: Fingerprint) -> None:
    """Raise `UsageError` unless a run with the fingerprint `own` can resume from this file."""
    for key in {**own, **saved}:
        before, now = saved.get(key, "missing"), own.get(key, "missing")
        if before != now:
            raise UsageError(
                f"{file}: {key} is {before} in the snapshot and {now} here; choose another folder"
            )


def open_folder(
    settings: SnapshotSettings, fingerprint: Fingerprint
) -> tuple[SnapshotWriter | None, Snapshot | None]:
    """On all ranks: the writer (rank 0's) for the folder, which is made, and the snapshot to resume
    from. Raises `UsageError` on all ranks if one cannot write to the folder, or does not see what
    rank 0 writes there."""
    folder, is_first = settings.folder, dist.get_rank() == 0
    with refuse_together():
        make_folder(folder)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".sign-") as sign:
        names = all_gather_object(Path(sign.name).name)
        is_seen = (folder / names[0]).exists()
        dist.barrier()
    with refuse_together():  # after all have deleted theirs: one that refuses ends the others
        if not is_seen:
            raise UsageError(
                f"snapshots in {folder}: what rank 0 writes is not seen here; all hosts must share "
                "it"
            )
    with refuse_together():
        newest = choose_snapshot(folder, fingerprint) if is_first else None
        writer = SnapshotWriter(folder) if is_first else None
    content = [serialise(vars(newest)) if newest else b""]
    dist.broadcast_object_list(content, src=0)
    return writer, Snapshot(**deserialise(content[0])) if content[0] else None
