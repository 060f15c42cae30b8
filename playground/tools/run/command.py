"""The command of a lesson that is a program: it runs the lesson's file, and its constants are
options. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from playground.base.constants import Constant, Value, read_constants
from playground.base.errors import UsageError
from playground.base.remote import file_of, parse_module
from playground.lessons.lesson_row import Lesson
from playground.tools.run.options import ProgramOptions, constant_option, program_options
from playground.ui.options import options
from playground.ui.session import Session, session_command
from playground.world.launcher.rounds import ROUNDS


def lesson_command(lesson: Lesson) -> click.Command:
    """`playground NAME`: run the file of the lesson as `run` does."""
    constants = constants_of(lesson)

    @session_command(
        lesson.name,
        *map(constant_option, constants.values()),
        program_options(output=ROUNDS),
        only=("size", "backend", "gpus", "gpu_memory", "see"),
        size=lesson.default_size,
        help=lesson.help,
        short_help=lesson.teaches,
    )
    def command(session: Session, asked: ProgramOptions, **values: Value) -> None:
        from playground.tools.run.start import run_lesson  # not for --help

        run_lesson(session, lesson, asked, changed_values(values, constants))

    return command


def read_values(lesson: Lesson, words: Sequence[str]) -> tuple[tuple[str, Value], ...]:
    """Names and values of the constants that `words` set, as the command's options do. Raises
    `UsageError`."""
    constants = constants_of(lesson)

    @click.command(lesson.name, add_help_option=False)
    @options(*map(constant_option, constants.values()))
    def command(**values: Value) -> tuple[tuple[str, Value], ...]:
        return changed_values(values, constants)

    try:
        found: tuple[tuple[str, Value], ...] = command.main([*words], standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    return found


def constants_of(lesson: Lesson) -> Mapping[str, Constant]:
    """The constants of its program, by name."""
    module = lesson.module
    return read_constants(file_of(module).read_bytes(), parse_module(module)).literals


def changed_values(
    values: Mapping[str, Value], constants: Mapping[str, Constant]
) -> tuple[tuple[str, Value], ...]:
    """Those that are not what the program says."""
    changed = (name for name, value in values.items() if value != constants[name].value)
    return tuple((name, values[name]) for name in changed)
