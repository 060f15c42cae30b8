"""The line of the program that calls us: not one of ours that runs or records it, of torch's or of
Python's.

Does not import torch.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType

from playground.runtime.remote import ROOT

NONE = -1
MOST_CODES = 10_000
"""Number of codes that are kept: a program may make ever more of them."""
Line = tuple[str, int, str, str]
"""The unique name of a file, the line, its function, and the file's path."""
OURS = os.path.join("playground", "")
"""Prefix of the names of the package's own files."""
PACKAGE = os.path.join(os.path.abspath(ROOT), OURS)
MACHINERY = tuple(
    os.path.join(PACKAGE, *parts)
    for parts in (
        ("trace", "record", ""),
        ("remote", ""),
        ("play", ""),
        ("runtime", ""),
        ("testing", ""),
        *(("algorithms", name) for name in ("background.py", "collectives.py", "messages.py")),
        ("lessons", "all_reduce", "trace.py"),
    )
)
"""Modules of ours that run or record a program or an algorithm, and are neither."""
INSTALLED = tuple(
    os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib")
)
"""Folders of Python's own modules, and of other packages."""
PACKAGES = tuple(os.path.join(os.sep, name, "") for name in ("site-packages", "dist-packages"))
"""Names of such folders: a virtual environment may also see packages elsewhere, torch among
them."""


class Sources:
    """Finds lines of the program. `number` numbers those that are new."""

    def __init__(self, number: Callable[[Line], int]) -> None:
        self.number = number
        self.folder = os.path.join(os.getcwd(), "")
        self.numbers: dict[int, dict[int, int] | None] = {}
        """Numbers of the lines seen so far, by code (its id: hashing it takes longer than all the
        rest) and instruction; None for code that is not the program's."""
        self.codes: list[CodeType] = []
        """The codes seen so far: kept, so that no other gets the same id."""

    def find(self, depth: int = 2) -> int:
        """The number of the innermost line of the program; -1 if there is none. The first `depth`
        frames, this one included, are skipped."""
        frame: FrameType | None = sys._getframe(depth)
        known = self.numbers
        while frame is not None:
            code = frame.f_code
            numbers = known[id(code)] if id(code) in known else self.add_code(code)
            if numbers is not None:
                number = numbers.get(frame.f_lasti)
                if number is None:
                    path = os.path.abspath(code.co_filename)
                    number = self.number((self.name_of(code), frame.f_lineno, code.co_name, path))
                    numbers[frame.f_lasti] = number
                return number
            frame = frame.f_back
        return NONE

    def add_code(self, code: CodeType) -> dict[int, int] | None:
        if len(self.codes) >= MOST_CODES:
            self.numbers.clear()
            self.codes.clear()
        self.codes.append(code)
        return self.numbers.setdefault(id(code), {} if self.name_of(code) else None)

    def name_of(self, code: CodeType) -> str:
        """The unique name of its file: relative to the package's folder or to the working folder,
        or its path. Empty if the code is not the program's."""
        if code.co_filename.startswith("<"):  # of no file
            return ""
        path = os.path.abspath(code.co_filename)
        if path.startswith(PACKAGE):
            return "" if path.startswith(MACHINERY) else OURS + path.removeprefix(PACKAGE)
        if path.startswith(INSTALLED) or any(name in path for name in PACKAGES):
            return ""
        name = path.removeprefix(self.folder)
        return path if name.startswith(OURS) else name
