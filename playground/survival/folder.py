"""The folder of a run's snapshots: what is in it, what of it is whole, which to go on from, and the lock by which it
belongs to one run at a time. Does not import torch.

    step-00000120/rank-0.snapshot    what is rank 0's own, and what is the same on all ranks
    step-00000120/rank-1.snapshot    what is rank 1's own; as many as there are ranks

A snapshot is whole when the files of all its ranks match their manifests. The folder of one that is given up becomes
that of the next, whose ranks write over its files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from playground.runtime.errors import UsageError
from playground.runtime.files import NO_LINK
from playground.survival.disk import remove_folders, replace, spare_folder, sync_folder
from playground.survival.fingerprint import Fingerprint, find_difference
from playground.survival.manifest import (
    Manifest,
    OtherSchema,
    check_state,
    decode,
    open_part,
    rank_file,
    sha256_of_rest,
)

STEP = re.compile(r"step-(\d{8,})")
"""The name of a snapshot's folder."""
MARKER = "RESUMABLE"
"""A file beside the snapshots of a run that was asked to end and is to be resumed: for job managers that cannot see the
exit code (behind torchrun, say), and for people."""
MAX_DEFECTS = 10
"""That are named of a snapshot; after them no further file is looked at."""
WHOLE, INCOMPLETE, DAMAGED, OTHER_SCHEMA = "whole", "incomplete", "damaged", "of another version"


@dataclass(frozen=True)
class SnapshotFile:
    """A whole snapshot: where it is, and what it is of."""

    folder: Path
    step: int
    size: int
    """Ranks that wrote it."""
    fingerprint: Fingerprint


@dataclass(kw_only=True)
class Examined:
    """The contents found in the folder of one step."""

    folder: Path
    step: int
    condition: str = WHOLE
    """`WHOLE`, `INCOMPLETE` (a file is missing: the run was killed, or is writing), `DAMAGED` or `OTHER_SCHEMA`."""
    defects: list[str] = field(default_factory=list)
    """Which files, and what is wrong with each."""
    size: int | None = None
    """Ranks that wrote it; None if no manifest can be read."""
    nbytes: int = 0
    """Total bytes of all files whose manifests can be read."""
    written: float | None = None
    """When the last of them was, in seconds since 1970."""
    fingerprint: Fingerprint = field(default_factory=dict)

    @property
    def snapshot(self) -> SnapshotFile | None:
        """The snapshot, if it is whole."""
        if self.condition != WHOLE or self.size is None:
            return None
        return SnapshotFile(self.folder, self.step, self.size, self.fingerprint)

    def __str__(self) -> str:
        """Its condition, and why."""
        return f"{self.condition} ({'; '.join(self.defects)})"

    def add(self, condition: str, defect: str) -> None:
        """Note a defect. Damage outweighs what is merely missing, and another version outweighs both."""
        order = (WHOLE, INCOMPLETE, DAMAGED, OTHER_SCHEMA)
        self.condition = max(self.condition, condition, key=order.index)
        self.defects.append(defect)


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def find_steps(folder: Path) -> list[int]:
    """The steps of which `folder` holds anything, the newest first."""
    names = map(STEP.fullmatch, os.listdir(folder) if folder.is_dir() else ())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def examine(folder: Path, step: int, *, read_contents: bool) -> Examined:
    """Look at the snapshot of `step` in `folder`. Without `read_contents` only manifests and lengths are checked."""
    found = Examined(folder=step_folder(folder, step), step=step)
    examine_part(found, rank_file(0), read_contents)
    for rank in range(1, found.size or 1):
        if len(found.defects) == MAX_DEFECTS:
            found.add(found.condition, "and so on")
            break
        examine_part(found, rank_file(rank), read_contents)
    return found


def examine_part(found: Examined, name: str, read_contents: bool) -> None:
    """Compare a rank's file with its manifest, and that with the others'. Note in `found` what is wrong."""
    try:
        with open_part(found.folder / name) as stream:
            manifest = decode(stream)
            add_manifest(found, name, manifest)
            if (length := os.fstat(stream.fileno()).st_size - stream.tell()) != manifest.nbytes:
                found.add(DAMAGED, f"{name} has {length:,} of {manifest.nbytes:,} bytes")
            elif read_contents:
                examine_contents(found, name, stream, manifest)
    except FileNotFoundError:
        found.add(INCOMPLETE, f"{name} is missing")
    except OtherSchema as error:
        found.add(OTHER_SCHEMA, str(error))
    except (OSError, ValueError):
        found.add(DAMAGED, f"the manifest of {name} is damaged")


def examine_contents(found: Examined, name: str, stream: BinaryIO, manifest: Manifest) -> None:
    """Compare what follows the manifest with its checksum, and see that it is a state."""
    start = stream.tell()
    if sha256_of_rest(stream) != manifest.sha256:
        found.add(DAMAGED, f"the checksum of {name} differs")
        return
    stream.seek(start)
    line = stream.readline()
    try:
        check_state(line, manifest.nbytes - len(line))
    except (ValueError, TypeError):
        found.add(DAMAGED, f"the state in {name} is none that a run writes")


def add_manifest(found: Examined, name: str, manifest: Manifest) -> None:
    """Add what this manifest says; it must be of the snapshot that the first one is of."""
    found.nbytes += manifest.nbytes
    found.written = max(found.written or 0, manifest.written)
    if found.size is None:
        found.size, found.fingerprint = manifest.size, manifest.fingerprint
    if manifest.step != found.step:
        found.add(INCOMPLETE, f"{name} is still of step {manifest.step}")  # which was given up
    elif manifest.size != found.size or manifest.fingerprint != found.fingerprint:
        found.add(INCOMPLETE, f"{name} is of another run")  # one that wrote the same step into the same folder


def find_newest(folder: Path, fingerprint: Fingerprint, say: Callable[[str], None]) -> SnapshotFile | None:
    """The newest snapshot in `folder` that is whole on all its ranks, every file read; None if there is none.

    Those that are not are named by `say`, and the one before is looked at. However many ranks took it will do. Raises
    `UsageError` if that snapshot is of another run, or one of another version is newer.
    """
    for step in find_steps(folder):
        found = examine(folder, step, read_contents=True)
        if found.condition == OTHER_SCHEMA:
            why = "go on with the version that wrote it, or choose another folder"
            raise UsageError(f"snapshot {found.folder}: {found.defects[0]}; {why}")
        if found.snapshot:
            check_same_run(found.snapshot, fingerprint)
            return found.snapshot
        say(f"the snapshot of step {step} is {found}: looking for one before it")
    return None


def check_same_run(snapshot: SnapshotFile, fingerprint: Fingerprint) -> None:
    """Raise `UsageError` unless a run with this fingerprint can go on from `snapshot`."""
    if difference := find_difference(snapshot.fingerprint, fingerprint):
        raise UsageError(
            f"snapshot {snapshot.folder} is of another run: {difference}; all must be the same: take the snapshot's, "
            f"or another folder"
        )


def require_unused(folder: Path) -> None:
    """Raise `UsageError` if there are snapshots in `folder`, for a run that starts from the beginning."""
    if steps := find_steps(folder):
        raise UsageError(
            f"{folder} holds snapshots (up to step {steps[0]}): go on from them, or choose a folder that has none"
        )


def prune(folder: Path, step: int, size: int, keep: int, known: Collection[int]) -> set[int]:
    """Give up what is older than `step` and not among the `keep` newest snapshots that are whole, `step` included.

    Call it when `step` is whole: then older ones are no longer written. Newer ones are left alone: a run that went
    back on purpose writes it again, and until then has the one it went back to. `known`: steps that need not be looked
    at again, because they are known to be whole, of `size` ranks. Returns those that are now. Without any, as at first,
    contents are read: a power failure may have left some that only look whole.
    """
    kept, whole = 1, {step}
    for each in (each for each in find_steps(folder) if each < step):
        found = Examined(folder=step_folder(folder, each), step=each, size=size)
        if each not in known:
            found = examine(folder, each, read_contents=not known)
        if found.condition == WHOLE and kept < keep:
            kept += 1
            whole |= {each} if found.size == size else set()
        elif found.condition != OTHER_SCHEMA:
            # Let the next snapshot have the folder; remove it if it is of another number of ranks.
            spare_folder(found.folder) if found.size == size else remove_folders(folder, [found.folder.name])
    return whole


def write_marker(folder: Path, about: Mapping[str, object]) -> Path:
    """Write the file, a line `name: value` for each of `about`. Returns its path; raises `OSError`."""
    file = folder / MARKER
    lines = "".join(f"{name}: {value}\n" for name, value in about.items())
    replace(file, lines.encode("utf-8", "surrogateescape"), memoryview(b""))
    sync_folder(folder)
    return file


def remove_marker(folder: Path) -> None:
    """The run goes on, or another one begins: it is true no longer. Any number of ranks may call this."""
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)


PATIENCE = 2.0
"""Seconds for which a run waits for another one to let go: the kernel does that for a process that was killed."""
IN_USE = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Held by the process of rank 0 until it ends, however it ends.

    The lock is one of POSIX: unlike that of `flock`, processes that rank 0 forks (those of its loader) do not go on
    holding it. Where the file system has no locks, or the system no `fcntl`, it does nothing. Raises `UsageError`
    if another process holds it, and where its file cannot be opened or is a symbolic link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        except OSError as error:
            why = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
            raise UsageError(f"snapshots in {folder}: its .lock {why}; choose another folder") from None
        self.release = weakref.finalize(self, os.close, self.descriptor)
        """Lets others have the folder. A second call does nothing."""
        deadline = time.monotonic() + PATIENCE
        while not self.acquire():
            if time.monotonic() > deadline:
                said = os.read(self.descriptor, 300).decode(errors="replace").strip()
                who = said if said and said.isprintable() else "another process"
                self.release()
                raise UsageError(
                    f"snapshots in {folder}: {who} is writing its own there; wait for its end, or choose another folder"
                )
            time.sleep(0.02)
        with contextlib.suppress(OSError):  # it is only for the message
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def acquire(self) -> bool:
        """Take the lock; False if another process holds it."""
        try:
            import fcntl

            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return True
        except OSError as error:
            return error.errno not in IN_USE
        return True
