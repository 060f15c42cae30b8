"""The boards: each lesson's `lesson.py`, a program that needs torch and no other part of the
playground."""

from __future__ import annotations

from pathlib import Path

import playground
from playground.lessons import PATH

LESSONS = Path(playground.__file__).parent / "lessons"

BOARDS = [Path(lesson.path).name for lesson in PATH]
"""Their folders, in the order of the path."""
LONGEST = {
    "data_parallel": 170,
    "bert": 270,
    "elastic": 164,
    "rpc": 302,
    "parameter_server": 205,
    "pipeline": 215,
    "memory": 230,
    "tensor": 360,
    "context": 285,
    "experts": 285,
    "mesh": 170,
    "checkpoint": 210,
    "bytes": 207,
}
"""Lines that a board may have, if more than 150; rows of tables are not counted."""


def source_of(lesson: str) -> str:
    return (LESSONS / lesson / "lesson.py").read_text(encoding="utf-8")
