"""The line of the program that calls us: not one of ours that runs or records it, of torch's or of
Python's.

Does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from playground.base.event_log import NONE
from playground.base.frames import PACKAGE, is_program

MOST_CODES = 10_000
"""Number of codes that are kept: a program may make ever more of them."""
Line = tuple[str, int, str, str]
"""The unique name of a file, the line, its function, and the file's path."""
OUR_FILES = os.path.join("playground", "")
"""Prefix of the names of the package's own files."""


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
        return self.find_from(sys._getframe(depth))

    def find_from(self, frame: FrameType | None) -> int:
        """The number of the innermost line of the program in this frame and those that called
        it."""
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
        if not is_program(code.co_filename):
            return ""
        path = os.path.abspath(code.co_filename)
        if path.startswith(PACKAGE):
            return OUR_FILES + path.removeprefix(PACKAGE)
        name = path.removeprefix(self.folder)
        return path if name.startswith(OUR_FILES) else name
