"""The command of a lesson that is a program: it runs the lesson's file, and its constants are
options. Does not import torch."""

from __future__ import annotations

from typing import Any

import click

from playground.console.lesson import Lesson
from playground.console.session import Session, session_command
from playground.runtime.constants import read_constants
from playground.runtime.launcher import server
from playground.runtime.launcher.rounds import ROUNDS
from playground.runtime.program import Program, find_shared_imports, path_of_new_interpreter
from playground.runtime.remote import file_of, parse
from playground.tools.run.options import ProgramOptions, constant_option, program_options
from playground.tools.run.start import RUN_PROGRAM, prepare_start, run_on_ranks


def lesson_command(lesson: Lesson) -> click.Command:
    """`playground NAME`: run the file of the lesson as `run` does."""
    file, tree = file_of(lesson.module()), parse(lesson.module())
    constants = read_constants(file.read_bytes(), tree).literals

    @session_command(
        lesson.name,
        *map(constant_option, constants.values()),
        program_options(output=ROUNDS),
        only=("size", "backend", "see"),
        size=lesson.default_size,
        help=lesson.help,
        short_help=lesson.teaches,
    )
    def command(session: Session, asked: ProgramOptions, **values: Any) -> None:
        program = Program(
            name=str(file),
            path=path_of_new_interpreter(),
            uses_device=True,
            constants=tuple(
                (name, value) for name, value in values.items() if value != constants[name].value
            ),
        )
        if prepare_start(session, asked):
            server.preload(*find_shared_imports(tree))
            session.world.warm_up(RUN_PROGRAM)
        run_on_ranks(session, program, asked)

    return command
