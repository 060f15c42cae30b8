"""The system calls that the writer of snapshots makes, recorded, and what a crash leaves of their effects."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

BLOCK = 128
"""Bytes of which a disk writes all or nothing."""
Call = tuple[str, str, Any]
"""What was called, on which path, and with what else."""


class RecordingOS:
    """Takes the place of `os` in a module. Does what it is asked, and writes down every call that changes the disk."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.paths: dict[int, str] = {}
        self.positions: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        self.paths[descriptor], self.positions[descriptor] = str(path), 0
        if flags & os.O_CREAT:
            self.calls.append(("create", str(path), None))
        return descriptor

    def write(self, descriptor: int, block: memoryview) -> int:
        """Every second time the system takes less than it is given, as it may."""
        if len(block) > 1 and not (self.calls and self.calls[-1][0] == "write"):
            block = block[: len(block) // 2]
        written = os.write(descriptor, block)
        position = self.positions[descriptor]
        self.calls.append(("write", self.paths[descriptor], (position, bytes(block[:written]))))
        self.positions[descriptor] += written
        return written

    def lseek(self, descriptor: int, position: int, whence: int) -> int:
        self.positions[descriptor] = os.lseek(descriptor, position, whence)
        return self.positions[descriptor]

    def ftruncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)
        self.calls.append(("truncate", self.paths[descriptor], length))

    def fdatasync(self, descriptor: int) -> None:
        self.fsync(descriptor)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.calls.append(("fsync", self.paths[descriptor], None))

    def rename(self, path: Path, other: Path) -> None:
        os.rename(path, other)
        self.calls.append(("rename", str(path), str(other)))

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self.calls.append(("mkdir", str(path), None))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self.calls.append(("unlink", str(path), None))

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)
        self.calls.append(("rmdir", str(path), None))


@dataclass(eq=False)
class File:
    """Contents as a process sees them, and as they lie on the disk for certain."""

    volatile: bytes = b""
    durable: bytes = b""

    def survivor(self, chance: float, random: Random) -> bytes:
        """What a crash leaves: of each block what was written last, with this chance, or what was synced."""
        new, old = self.volatile, self.durable
        kept = b"".join(
            (new if random.random() < chance else old)[start : start + BLOCK] for start in range(0, len(new), BLOCK)
        )
        return kept if random.random() < chance or new == old else old


@dataclass(eq=False)
class Folder:
    """Names, likewise."""

    volatile: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """Plays recorded calls. What no fsync has followed may be lost in a power failure, file by file."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Folder()

    def folder_of(self, path: str) -> tuple[Folder, str]:
        *parents, name = Path(path).relative_to(self.root).parts
        folder = self.top
        for parent in parents:
            below = folder.volatile[parent]
            assert isinstance(below, Folder)
            folder = below
        return folder, name

    def play(self, call: Call) -> None:
        kind, path, more = call
        if Path(path) == self.root:
            assert kind == "fsync"
            self.top.durable = dict(self.top.volatile)
            return
        folder, name = self.folder_of(path)
        if kind == "create":
            folder.volatile.setdefault(name, File())
        elif kind == "mkdir":
            folder.volatile[name] = Folder()
        elif kind in ("unlink", "rmdir"):
            del folder.volatile[name]
        elif kind == "rename":
            target, new = self.folder_of(more)
            target.volatile[new] = folder.volatile.pop(name)
        else:
            change(folder.volatile[name], kind, more)

    def survivors(self, chance: float, random: Random) -> dict[str, bytes | None]:
        """The paths after a crash, with their contents (None for a folder): each file and folder keeps what was never
        synced with this chance. 1.0: the process was killed; 0.0: the power failed, and everything unsynced is lost."""
        found: dict[str, bytes | None] = {}

        def walk(folder: Folder, path: str) -> None:
            kept = folder.volatile if random.random() < chance else folder.durable
            for name, node in kept.items():
                if isinstance(node, Folder):
                    found[f"{path}{name}"] = None
                    walk(node, f"{path}{name}/")
                else:
                    found[f"{path}{name}"] = node.survivor(chance, random)

        walk(self.top, "")
        return found


def change(node: File | Folder, kind: str, more: Any) -> None:
    """Do to this file or folder what was recorded."""
    if kind == "fsync" and isinstance(node, Folder):
        node.durable = dict(node.volatile)
        return
    assert isinstance(node, File)
    if kind == "fsync":
        node.durable = node.volatile
    elif kind == "truncate":
        node.volatile = node.volatile[:more]
    else:
        position, written = more
        padded = node.volatile.ljust(position, b"\0")
        node.volatile = padded[:position] + written + padded[position + len(written) :]


def make_files(folder: Path, contents: dict[str, bytes | None]) -> None:
    """Write what `survivors` has left into an empty folder."""
    folder.mkdir()
    for path, content in contents.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
