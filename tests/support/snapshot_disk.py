"""The system calls by which a snapshot is written, recorded, and what a crash leaves of their effects."""

from __future__ import annotations

import os
from dataclasses import dataclass
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

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        self.paths[descriptor] = str(path)
        if flags & os.O_CREAT:
            self.calls.append(("create", str(path), None))
        return descriptor

    def write(self, descriptor: int, block: memoryview) -> int:
        """Every second time the system takes less than it is given, as it may."""
        if len(block) > 1 and not (self.calls and self.calls[-1][0] == "write"):
            block = block[: len(block) // 2]
        written = os.write(descriptor, block)
        self.calls.append(("write", self.paths[descriptor], bytes(block[:written])))
        return written

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.calls.append(("fsync", self.paths[descriptor], None))

    def rename(self, path: Path, other: Path) -> None:
        os.rename(path, other)
        self.calls.append(("rename", str(path), str(other)))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self.calls.append(("unlink", str(path), None))


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


class Disk:
    """Plays the calls recorded in one folder. What no fsync has followed may be lost in a power failure."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.volatile: dict[str, File] = {}
        self.durable: dict[str, File] = {}
        """The names in the folder, likewise."""

    def play(self, call: Call) -> None:
        kind, path, more = call
        if Path(path) == self.root:
            assert kind == "fsync"
            self.durable = dict(self.volatile)
            return
        name = Path(path).name
        if kind == "create":
            self.volatile.setdefault(name, File()).volatile = b""
        elif kind == "write":
            self.volatile[name].volatile += more
        elif kind == "fsync":
            self.volatile[name].durable = self.volatile[name].volatile
        elif kind == "rename":
            self.volatile[Path(more).name] = self.volatile.pop(name)
        else:
            del self.volatile[name]

    def survivors(self, chance: float, random: Random) -> dict[str, bytes]:
        """The files after a crash: each keeps what was never synced with this chance. 1.0: the process was killed; 0.0:
        the power failed, and everything unsynced is lost."""
        names = {
            name
            for name in {**self.durable, **self.volatile}
            if name in (self.volatile if random.random() < chance else self.durable)
        }
        files = {name: self.volatile.get(name) or self.durable[name] for name in sorted(names)}
        return {name: file.survivor(chance, random) for name, file in files.items()}


def make_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Write what `survivors` has left into an empty folder."""
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
