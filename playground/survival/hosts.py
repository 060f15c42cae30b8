"""Snapshots of ranks on several hosts, which may see one folder of snapshots or have one per host.

Where folders differ, the first of the ranks that see the same one writes whole snapshots for all; a run goes on from
the newest snapshot that is whole in any of the folders, wherever its ranks are now. All ranks must call all of this.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms.hosts import Hosts
from playground.runtime import UsageError, report, restart_count
from playground.runtime.host import host_id
from playground.runtime.meeting.agreement import all_gather_object, refuse_together
from playground.survival.disk import make_folder
from playground.survival.fingerprint import Fingerprint
from playground.survival.folder import (
    STEP,
    FolderLock,
    SnapshotFile,
    check_same_run,
    examine,
    find_newest,
    require_unused,
)
from playground.survival.settings import AUTO, NO, SnapshotSettings
from playground.survival.snapshots import Snapshots, State, load, load_all


def find_named(folder: Path, fingerprint: Fingerprint) -> SnapshotFile:
    """The snapshot in this folder of one step."""
    name = STEP.fullmatch(folder.name)
    if not name or not folder.is_dir():
        raise UsageError(f"--resume {folder}: name a snapshot, FOLDER/step-00000100, or take auto or no")
    found = examine(folder.parent, int(name[1]), read_contents=True)
    if found.snapshot is None:
        raise UsageError(f"--resume {folder}: it is {found}: take another one")
    check_same_run(found.snapshot, fingerprint)
    return found.snapshot


def find_sharers(folder: Path) -> Hosts:
    """Which ranks see the same files in `folder`, as if each such folder were a host. It is made where it is missing.

    On several hosts, the first rank of each leaves a file there for a moment, and all look whose files they see.
    Raises `UsageError` on all ranks if it cannot be written to on one.
    """
    with refuse_together():
        make_folder(folder)
    hosts = Hosts.from_ids(all_gather_object(host_id()))
    if not hosts.several:
        return hosts
    rank = dist.get_rank()
    sign = folder / f".seen-by-{uuid.uuid4().hex}" if hosts.of(rank)[0] == rank else None
    if sign:
        sign.touch()
    signs = all_gather_object(sign and sign.name)
    sharers = Hosts.from_ids(all_gather_object(tuple(bool(name and (folder / name).exists()) for name in signs)))
    if sign:
        sign.unlink()
    return sharers


@dataclass(frozen=True)
class Choice:
    """The snapshot that a run resumes from."""

    snapshot: SnapshotFile
    holder: int
    """The first of the ranks that see it."""


@dataclass(frozen=True)
class Found:
    """The contents of one of the folders."""

    snapshot: SnapshotFile | None
    notices: Sequence[str]
    refusal: str
    """Why a snapshot that is asked for by name cannot be had here."""


def agree_on_snapshot(settings: SnapshotSettings, fingerprint: Fingerprint, sharers: Hosts) -> Choice | None:
    """The newest snapshot in any folder, or the one that is named; None to begin at the start. Raises `UsageError` on
    all ranks if in one of the folders there is another run's."""
    restarted = any(all_gather_object(restart_count() > 0))
    rank, found = dist.get_rank(), None
    with refuse_together():
        if sharers.of(rank)[0] == rank:
            found = look(settings, fingerprint, restarted)
    by_holder = {holder: each for holder, each in enumerate(all_gather_object(found)) if each}
    if rank == 0:
        for notice in (notice for each in by_holder.values() for notice in each.notices):
            report(notice=notice)
    choices = [Choice(each.snapshot, holder) for holder, each in by_holder.items() if each.snapshot]
    refusal = next((each.refusal for each in by_holder.values() if each.refusal), "")
    if refusal and not choices:
        raise UsageError(refusal)
    return max(choices, key=lambda choice: choice.snapshot.step, default=None)


def look(settings: SnapshotSettings, fingerprint: Fingerprint, restarted: bool) -> Found:
    """The contents that this rank sees, however many ranks took the snapshot. A run that was `restarted` takes the
    newest. One that is asked for by name need not lie in every folder. Raises `UsageError` for another run's."""
    notices: list[str] = []
    if restarted or settings.resume == AUTO:
        return Found(find_newest(settings.folder, fingerprint, notices.append), notices, "")
    if settings.resume == NO:
        require_unused(settings.folder)
        return Found(None, notices, "")
    try:
        return Found(find_named(Path(settings.resume), fingerprint), notices, "")
    except UsageError as error:
        return Found(None, notices, str(error))


def load_states(choice: Choice, sharers: Hosts) -> list[State]:
    """The state in the chosen snapshot, by rank of the run that took it; where one folder is shared, and there were
    as many ranks as now, only for this rank is it more than empty.

    If there are several folders, the holder sends it all to all, on hosts whose folder is empty too.
    """
    rank, snapshot = dist.get_rank(), choice.snapshot
    if not sharers.several:
        if snapshot.size != dist.get_world_size():
            return load_all(snapshot)
        return [load(snapshot, rank) if each == rank else State() for each in range(snapshot.size)]
    content: list[bytes] = [b""]
    if rank == choice.holder:
        states = load_all(snapshot)
        content = [to_bytes({"shared": states[0].shared, "own": [state.own for state in states]})]
    dist.broadcast_object_list(content, src=choice.holder)
    loaded = from_bytes(content[0])
    return [State(shared=loaded["shared"], own=own) for own in loaded["own"]]


class HostSnapshots(Snapshots):
    """Snapshots of ranks of which only `sharers` share a folder: the first of these has gathered the states of all
    ranks, and writes them."""

    def __init__(
        self, sharers: Hosts, folder: Path, fingerprint: Fingerprint, *, rank: int, size: int, keep: int
    ) -> None:
        super().__init__(folder, fingerprint, rank=rank, size=size, keep=keep)
        self.writers = [ranks[0] for ranks in sharers.members]
        if rank in self.writers and not self.lock:
            self.lock = FolderLock(folder)

    def save(self, step: int, state: State) -> None:
        """As on one host. Blocks until all have come, for what each rank alone has is exchanged here."""
        content, gathered = to_bytes(state.own), list[bytes]()
        for writer in self.writers:
            contents = [b""] * self.size if self.rank == writer else None
            dist.gather_object(content, contents, dst=writer)
            gathered = contents or gathered
        if gathered:
            self.save_all(step, [State(shared=state.shared, own=from_bytes(each)) for each in gathered])


def open_snapshots(settings: SnapshotSettings, fingerprint: Fingerprint, sharers: Hosts) -> Snapshots:
    """The snapshots of a run, as its ranks share folders. Raises `UsageError` on all ranks if one of them cannot."""
    rank, size = dist.get_rank(), dist.get_world_size()
    code = partial(HostSnapshots, sharers) if sharers.several else Snapshots
    with refuse_together():
        snapshots = code(settings.folder, fingerprint, rank=rank, size=size, keep=settings.keep)
    return snapshots


def to_bytes(state: object) -> bytes:
    """A state for the way to another host, whose devices may be others."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
