"""What records refer to by number, written line by line while it comes up: names, shapes, groups, lines of the program.
Does not import torch.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from types import CodeType, FrameType

from playground.runtime.remote import ROOT

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


OURS = os.path.join("playground", "")
"""What the names of the package's own files begin with."""
PACKAGE = os.path.join(os.path.abspath(ROOT), OURS)
MACHINERY = tuple(
    os.path.join(PACKAGE, *parts)
    for parts in (
        ("see", "record", ""),
        ("remote", ""),
        ("runtime", ""),
        ("testing", ""),
        *(("algorithms", name) for name in ("background.py", "collectives.py", "messages.py", "process_group.py")),
        ("lessons", "all_reduce", "trace.py"),
    )
)
"""What of ours runs a program, carries out an algorithm or records it, and is neither program nor algorithm."""
INSTALLED = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib"))
"""Where Python's own modules are, and those of other packages."""
PACKAGES = tuple(os.path.join(os.sep, name, "") for name in ("site-packages", "dist-packages"))
"""What such folders are called: a virtual environment may also see packages that lie elsewhere, torch among them."""


class Sources:
    """Finds lines, and gives each its number in `table`."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.folder = os.path.join(os.getcwd(), "")
        self.numbers: dict[int, dict[int, int] | None] = {}
        """Of the lines seen so far, by code (its id: to hash it takes longer than all the rest) and instruction; None
        where the code is not the program's."""
        self.codes: list[CodeType] = []
        """Those: kept, so that no other gets its id."""

    def find(self, depth: int = 2) -> int:
        """The number of the innermost line that is the program's; -1 if there is none. The first `depth` frames, this
        one included, are not looked at."""
        frame: FrameType | None = sys._getframe(depth)
        known = self.numbers
        while frame is not None:
            code = frame.f_code
            numbers = known[id(code)] if id(code) in known else self.add_code(code)
            if numbers is not None:
                number = numbers.get(frame.f_lasti)
                return self.add(code, frame) if number is None else number
            frame = frame.f_back
        return -1

    def add_code(self, code: CodeType) -> dict[int, int] | None:
        self.codes.append(code)
        numbers: dict[int, int] | None = {} if self.name_of(code) else None
        self.numbers[id(code)] = numbers
        return numbers

    def add(self, code: CodeType, frame: FrameType) -> int:
        number = self.table[self.name_of(code), frame.f_lineno, code.co_name, os.path.abspath(code.co_filename)]
        numbers = self.numbers[id(code)]
        assert numbers is not None
        numbers[frame.f_lasti] = number
        return number

    def name_of(self, code: CodeType) -> str:
        """The name of its file, which no other has: relative to the package's folder or to the working folder, or its
        path. Empty if the code is not the program's."""
        if code.co_filename.startswith("<"):  # of no file
            return ""
        path = os.path.abspath(code.co_filename)
        if path.startswith(PACKAGE):
            return "" if path.startswith(MACHINERY) else OURS + path.removeprefix(PACKAGE)
        if path.startswith(INSTALLED) or any(name in path for name in PACKAGES):
            return ""
        name = path.removeprefix(self.folder)
        return path if name.startswith(OURS) else name
