"""The boards: each lesson's `lesson.py`, a program that needs torch and no other part of the
playground."""

from __future__ import annotations

from pathlib import Path

import playground
from playground.lessons import ROWS

LESSONS = Path(playground.__file__).parent / "lessons"

BOARDS = [Path(lesson.path).name for lesson in ROWS]
"""Their folders, in the order of the path."""


def source_of(lesson: str) -> str:
    return (LESSONS / lesson / "lesson.py").read_text(encoding="utf-8")
