"""What records refer to by number, written line by line while it comes up. Does not import torch."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Hashable
from pathlib import Path

NAME, SHAPE, GROUP, SOURCE, CLOCK, START, END = "name", "shape", "group", "source", "clock", "start", "end"
"""What a line of the tables is about: its first element."""


class Tables:
    """A file to which every line is written at once, so that it is there whatever happens to this process next."""

    def __init__(self, path: Path) -> None:
        self.file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)

    def write(self, about: str, *values: object) -> None:
        if self.file is not None:
            os.write(self.file, json.dumps([about, *values]).encode() + b"\n")

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
                self.tables.write(self.about, thing)
                self[thing] = len(self)
        return self[thing]
