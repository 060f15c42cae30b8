"""Lessons and exercises at the prompt. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from playground.base.errors import UsageError
from playground.base.remote import file_of
from playground.base.untrusted import printable
from playground.exercises.exercise import find_exercise
from playground.exercises.verdict import tell_lines
from playground.exercises.workbook import check_text
from playground.lessons import LESSONS
from playground.play.lesson_program import LessonProgram
from playground.tools.run.command import read_values
from playground.ui import terminal
from playground.ui.rendering import render_markdown
from playground.world.launcher.pool import keeping_worlds


def find_program(words: Sequence[str]) -> LessonProgram:
    """What the name of a lesson stands for, and the words after it: options for its constants.
    Raises `UsageError` for another name."""
    if not words:
        raise UsageError(f"%lesson NAME: {', '.join(LESSONS)}")
    name, *arguments = words
    if name not in LESSONS:
        raise UsageError(f"there is no lesson {name!r}: choose one of {', '.join(LESSONS)}")
    lesson = LESSONS[name]
    return LessonProgram(
        file_of(lesson.module),
        constants=read_values(lesson, arguments),
        needs_mnist=lesson.needs_mnist,
    )


def with_data(program: LessonProgram) -> LessonProgram:
    """The program, with the data that it needs on this host. Raises `NoData`."""
    if not program.needs_mnist:
        return program
    from playground.training.prepare import prepare_for_lessons  # most lessons do without

    tell = partial(print, file=sys.stderr)
    data = prepare_for_lessons(tell)
    tell(f"data: {data}")
    return replace(program, data=str(data.torchvision_root))


def begin_exercise(name: str, is_notebook: bool) -> tuple[str, str]:
    """The task, and the cell in which it is to be solved. Raises `UsageError` if there is no such
    exercise."""
    exercise = find_exercise(name)
    task = exercise.task
    if not is_notebook:
        task = render_markdown(task, terminal.width())
    return task, f"%%exercise {exercise.name}\n{exercise.new_stub()}"


@keeping_worlds()  # in which mistakes of the catalogue run, to be compared with a failure
def judge(name: str, cell: str) -> str:
    """The verdict on what was written below the first line of a cell, in lines. Raises `UsageError`
    if there is no such exercise."""
    exercise = find_exercise(name)
    verdict = check_text(exercise, f"\n{cell}", exercise.name)
    return "\n".join(map(printable, tell_lines(verdict)))
