"""Which line of the program something happens on."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

from playground.recording.tables import Table

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
OURS = os.path.join("playground", "")
"""What the names of the package's own files begin with."""
MACHINERY = tuple(
    os.path.join(PACKAGE, *parts)
    for parts in (
        ("recording", ""), ("remote", ""), ("runtime", ""), ("testing", ""),
        *(("algorithms", name) for name in ("background.py", "collectives.py", "messages.py", "process_group.py")),
        ("lessons", "all_reduce", "trace.py"),
    )
)  # fmt: skip
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
