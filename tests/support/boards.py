"""The boards: each lesson's `lesson.py`, a program that needs torch and no other part of the playground."""

from __future__ import annotations

from pathlib import Path

import playground

LESSONS = Path(playground.__file__).parent / "lessons"

BOARDS = {
    "hello": 4,
    "p2p": 2,
    "collectives": 4,
    "all_reduce": 4,
    "data_parallel": 1,
    "sgd": 2,
    "ladder": 2,
    "ddp": 2,
    "prove": 4,
    "bert": 2,
    "elastic": 2,
    "rpc": 3,
    "parameter_server": 3,
    "pipeline": 2,
    "zero": 2,
    "tensor": 2,
    "context": 2,
    "experts": 2,
    "mesh": 8,
}
"""By folder, in the order of the path: how many ranks its chapter starts."""
NOT_YET = {
    "all_reduce", "data_parallel", "prove", "bert", "elastic", "rpc", "parameter_server",
    "pipeline", "zero", "tensor", "mesh",
}  # fmt: skip
"""Lessons whose `lesson.py` still stands on other rooms."""
STANDING = [name for name in BOARDS if name not in NOT_YET]
LONGEST = {"p2p": 170, "collectives": 200, "all_reduce": 200, "sgd": 215, "ladder": 235, "context": 285, "experts": 285}
"""Lines that a board may have, if more than 150; rows of tables are not counted."""


def source_of(lesson: str) -> str:
    return (LESSONS / lesson / "lesson.py").read_text(encoding="utf-8")
