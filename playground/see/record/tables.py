"""What records refer to by number, written line by line while it comes up. Does not import torch."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

NAME, SHAPE, GROUP, SOURCE, CLOCK, START, END = "name", "shape", "group", "source", "clock", "start", "end"
"""What a line of the tables is about: its first element."""
MAX_THINGS = 2**16
"""Of a kind: records have two bytes for the number of a name."""


class Tables:
    """A file to which every line is written at once, so that it is there whatever happens to this process next."""

    def __init__(self, path: Path, on_failure: Callable[[str], None]) -> None:
        """`on_failure` is called with the reason when a line cannot be written; no other is written after it."""
        self.file: int | None = None
        self.on_failure = on_failure
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        except OSError as error:
            self.fail(str(error.strerror))

    def write(self, about: str, *values: object) -> None:
        if self.file is None:
            return
        line = json.dumps([about, *values]).encode() + b"\n"
        try:
            while line:  # of which a disk that is nearly full takes a part
                line = line[os.write(self.file, line) :]
        except OSError as error:
            self.fail(str(error.strerror))

    def fail(self, reason: str) -> None:
        self.close()
        self.on_failure(reason)

    def close(self) -> None:
        """What is written from now on is lost."""
        file, self.file = self.file, None
        if file is not None:
            os.close(file)


class Table(dict[Hashable, int]):
    """Numbers things from 0 on, as they are first asked for, and writes each down with the first."""

    def __init__(self, tables: Tables, about: str) -> None:
        super().__init__()
        self.tables, self.about = tables, about
        self.one_at_a_time = threading.Lock()

    def __missing__(self, thing: Hashable) -> int:
        with self.one_at_a_time:
            if thing not in self:
                if len(self) == MAX_THINGS:
                    self.tables.fail(f"more than {MAX_THINGS:,} {self.about}s")
                    return 0
                self.tables.write(self.about, thing)
                self[thing] = len(self)
        return self[thing]
