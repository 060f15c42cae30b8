"""The command of a lesson that is a program: it runs the lesson's file, and its constants are
options. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import click

from playground.console.lesson import Lesson
from playground.console.options import options
from playground.console.session import Session, session_command
from playground.runtime.constants import Constant, Value, read_constants
from playground.runtime.errors import UsageError
from playground.runtime.launcher import server
from playground.runtime.launcher.rounds import ROUNDS
from playground.runtime.program import Program, path_of_new_interpreter
from playground.runtime.remote import file_of, parse
from playground.tools.run.options import ProgramOptions, constant_option, program_options
from playground.tools.run.start import RUN_PROGRAM, prepare_start, run_on_ranks, share_imports

VISION = "torchvision"
"""What reads the data, and is imported once for all ranks."""


def lesson_command(lesson: Lesson) -> click.Command:
    """`playground NAME`: run the file of the lesson as `run` does."""
    file, tree, constants = file_of(lesson.module()), parse(lesson.module()), constants_of(lesson)

    @session_command(
        lesson.name,
        *map(constant_option, constants.values()),
        program_options(output=ROUNDS),
        only=("size", "backend", "see"),
        size=lesson.default_size,
        help=lesson.help,
        short_help=lesson.teaches,
    )
    def command(session: Session, asked: ProgramOptions, **values: Value) -> None:
        program = Program(
            name=str(file),
            path=path_of_new_interpreter(),
            uses_device=True,
            constants=changed_values(values, constants),
        )
        if prepare_start(session, asked):
            share_imports(file, tree)
            server.preload(*[VISION] * lesson.needs_mnist)
            session.world.warm_up(RUN_PROGRAM)
        if lesson.needs_mnist:
            prepare_data(session)
        run_on_ranks(session, program, asked)

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
    module = lesson.module()
    return read_constants(file_of(module).read_bytes(), parse(module)).literals


def changed_values(
    values: Mapping[str, Value], constants: Mapping[str, Constant]
) -> tuple[tuple[str, Value], ...]:
    """Those that are not what the program says."""
    changed = (name for name, value in values.items() if value != constants[name].value)
    return tuple((name, values[name]) for name in changed)


def prepare_data(session: Session) -> None:
    """Have the data on this host before a rank asks for it, and tell the ranks by the environment
    where it is. Digits replace MNIST where that is out of reach. Raises `NoData`."""
    from playground.training import prepare  # most lessons do without

    mirror = os.environ.get(prepare.MIRROR)
    data = prepare.prepare("auto", prepare.default_data_dir(), mirror, session.bar.announce)
    os.environ[prepare.DATA_DIR] = str(data.torchvision_root)
    if session.world.is_main:
        click.echo(f"data: {data}", err=True)
