"""The address of each text, program and exercise on the site."""

from __future__ import annotations

from pathlib import Path

from playground.base.remote import ROOT
from playground.exercises.exercise import CATALOGUE, FOLDER
from playground.lessons import ROWS
from playground.site.texts import CHAPTERS

HERE = Path(__file__).parent
CODE = ROOT / "playground"
_OTHERS = {
    "exercises": FOLDER / "README.md",
    "first": CODE / "lessons" / "first.ipynb",
    "house": CODE / "README.md",
}
TEXTS = {file: name for name, file in ({"index": ROOT / "README.md"} | CHAPTERS | _OTHERS).items()}
"""The page of each text."""
LESSON_FILES = {ROOT / lesson.path / "lesson.py": lesson.name for lesson in ROWS}
"""The chapter beside which the file of a lesson's program is shown."""
ADDRESSES = {file: f"{page}.html" for file, page in TEXTS.items()}
ADDRESSES |= {file: f"{page}.html#{file.name}-1" for file, page in LESSON_FILES.items()}
ADDRESSES |= {
    FOLDER / each.folder: f"{each.lesson}.html#exercise-{name}" for name, each in CATALOGUE.items()
}
"""The addresses of texts, programs, and the folders of exercises."""
