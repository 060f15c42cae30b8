"""Memory that events are written to. Does not import torch."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

PIECE = 2**20
"""Bytes that a file is given of the disk at a time."""


class Nowhere:
    """Memory that takes everything and keeps nothing."""

    def __getitem__(self, place: int) -> int:
        return 0

    def __setitem__(self, place: int, value: int) -> None:
        pass

    def release(self) -> None:
        pass


class MappedFile:
    """A new file of zeros, as memory that this process shares with it.

    Writing to a part of a mapped file for which the disk has no room ends the process by SIGBUS: nothing may be written
    beyond `allocated`, where the disk has set its room aside.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self.size, self.allocated = size, 0
        """In bytes."""
        try:
            os.ftruncate(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        except BaseException:
            os.close(self.file)
            raise

    def allocate_next(self) -> None:
        """Set room aside for the next `PIECE`. Raises `OSError` where there is none."""
        length = min(PIECE, self.size - self.allocated)
        self.allocate(self.allocated, length)
        self.allocated += length

    def allocate(self, place: int, length: int) -> None:
        """Set room aside for a part in which nothing has been written yet. Raises `OSError` where there is none."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file, place, length)
        else:
            os.pwrite(self.file, bytes(length), place)

    def close(self) -> None:
        """Nobody may use the memory any more."""
        self.memory.close()
        os.close(self.file)
