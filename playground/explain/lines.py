"""The line of the program that has caused a call, on each rank. Does not import torch."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType

from playground.base.event_log import NONE
from playground.explain.hang.sources import OUR_FILES, Line, Sources

PROGRAMS = (f"{OUR_FILES}lessons/", f"{OUR_FILES}exercises/", f"{OUR_FILES}tools/failures/")
"""Folders of the package that have programs. Other code of the package carries out what they
call."""
GENERATED = "torchinductor"
"""In the path of code that torch.compile has generated."""


class Lines(Sources):
    """Finds the line of the program that has caused a call."""

    def __init__(self) -> None:
        self.lines: dict[Line, int] = {}
        super().__init__(lambda line: self.lines.setdefault(line, len(self.lines)))

    def name_of(self, code: CodeType) -> str:
        name = super().name_of(code)
        carries = name.startswith(OUR_FILES) and not name.startswith(PROGRAMS)
        return "" if carries or GENERATED in name else name

    def find_frame(self) -> FrameType | None:
        """The innermost frame of the program in this thread."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self.name_of(frame.f_code):
            frame = frame.f_back
        return frame

    def find_cause(self) -> int:
        """The number of the innermost line of the program in this thread; in a thread that has
        none, as of autograd's for a GPU, that in the main thread."""
        number = self.find_from(sys._getframe(1).f_back)
        if number == NONE and threading.current_thread() is not threading.main_thread():
            number = self.find_from(sys._current_frames().get(threading.main_thread().ident or 0))
        return number
