"""From a command to the ranks of a program, a script or a lesson. Does not import torch."""

from __future__ import annotations

import ast
import os
import shlex
import sys
import textwrap
import uuid
from pathlib import Path

import click

from playground.base.constants import Value
from playground.base.errors import UsageError
from playground.base.files import make_folder, write_file
from playground.base.frames import add_program
from playground.base.imports import find_settings
from playground.base.remote import file_of, remote
from playground.explain.right import OFF
from playground.lessons.lesson_row import Lesson
from playground.tools.run.options import NO_LIMIT, ProgramOptions
from playground.ui.session import Session
from playground.world.launcher import fork_client
from playground.world.launcher.output import file_name, label_of
from playground.world.program import (
    Program,
    find_lessons,
    find_shared_imports,
    parse_program,
    path_of_new_interpreter,
)
from playground.world.rank.reports import BREAKPOINT, HUNG_UP, JOINED, Event
from playground.world.rendezvous.environment import rank_env_from

APART = "no rank has formed a process group: these were {size} independent runs of {name}"
IN_TURNS = (
    "rank {rank} is at a breakpoint ({breakpoint}); ranks are asked one after the other. --debug "
    "{rank} opens its breakpoints only, and has no timeout end the others' waiting"
)
FOR_HELP = {"-h", "--help"}
"""Arguments with which a script trains nothing."""
VISION = "torchvision"
"""What reads the data, and is imported once for all ranks."""
RUN_PROGRAM = remote("playground.world.program:run_program")
MEASURED = remote("playground.explain.cost.run:measured")
CHECKED = remote("playground.explain.right.run:checked")
MEMORY_TOLD = remote("playground.explain.memory.run:recorded")
IN_RANKS = (
    remote("playground.explain.right.checked:Checked"),
    remote("playground.explain.right.observer:checked"),
)


def share_imports(file: Path, tree: ast.Module) -> None:
    """Have the ranks' common imports done once, as the program in this file wants them."""
    add_program(str(file))
    for each in (tree, *map(parse_program, find_lessons(tree))):
        fork_client.preload(*find_shared_imports(each))
    fork_client.import_with(find_settings(tree, os.environ))


def warm_up(session: Session, asked: ProgramOptions) -> None:
    """Have the imports begin that all ranks of a program share, also of what is to check it."""
    needed = () if asked.check == OFF else IN_RANKS
    session.world.warm_up(RUN_PROGRAM, *needed)


def prepare_start(session: Session, asked: ProgramOptions) -> bool:
    """What comes before the ranks of a program, if they are ours to start. Returns whether they
    are. Raises `UsageError` where files for their output cannot be made."""
    world = session.world
    if world.rank_env is not None:
        return False
    if world.size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    tell_terminal_size(world.size)
    if isinstance(asked.output, Path):
        make_files(asked.output, world.size)
    return True


def run_on_ranks(
    session: Session,
    program: Program,
    asked: ProgramOptions,
    *,
    spawn: bool = False,
    grace: float | None = None,
) -> None:
    """Run the program on the ranks of the session's world. If none of them has formed a process
    group, say so. Raises what `launch` raises, and `UsageError` if its cost cannot be measured, a
    link not be simulated, or its training not be checked."""
    world = session.world
    if asked.profile or asked.link:
        world.around = MEASURED(world, asked.profile, asked.link)
    if asked.check != OFF:
        world.around = CHECKED(world, asked.check)
    if session.run.gpu_memory:
        world.around = MEMORY_TOLD(world)
    is_ours = world.rank_env is None
    if asked.debug is not None and not is_ours:
        raise UsageError(
            f"--debug {asked.debug}: others have started these ranks: leave it out, or start them "
            "with run"
        )
    run = str(uuid.uuid4()) if is_ours else ""
    reported = set[str]()

    def take(rank: int, event: Event) -> None:
        if BREAKPOINT in event and BREAKPOINT not in reported and asked.debug is None:
            click.echo(f"playground: {IN_TURNS.format(rank=rank, **event)}", err=True)
        reported.update(event)

    world.run(
        RUN_PROGRAM, program, run, session.restarts,
        bare=True, spawn=spawn, output=asked.output, grace=grace,
        timeout=asked.timeout or NO_LIMIT, on_report=take,
        debug=None if asked.debug is None else (asked.debug,),
    )  # fmt: skip
    is_apart = is_ours and world.size > 1 and reported.isdisjoint({JOINED, HUNG_UP})
    if is_apart and FOR_HELP.isdisjoint(program.arguments):
        is_script = program.is_one_file and not program.is_module
        more = shlex.join(["doctor", *program.words] if is_script else ["read", "ddp"])
        apart = f"playground: {APART.format(size=world.size, name=program.name)}."
        told = textwrap.fill(apart, 80, break_on_hyphens=False, break_long_words=False)
        click.echo(f"{told}\nWhat makes them one: python -m playground {more}", err=True)


def make_files(folder: Path, size: int) -> None:
    """Make the files for the output of ranks, empty. Raises `UsageError` where they cannot be."""
    try:
        make_folder(folder)
        for rank in range(size):
            for stream in ("stdout", "stderr"):
                write_file(folder / file_name(rank, stream), b"")
    except OSError as error:
        why = f"{os.fsdecode(error.filename)}: {error.strerror}"
        raise UsageError(f"--output-dir {folder}: {why}") from None


def tell_terminal_size(size: int) -> None:
    """Tell the ranks how large the terminal is that their lines are shown on, each behind its
    label. They write to pipes, which have no size."""
    if sys.stdout.isatty():
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        width = columns - len(label_of(size - 1))
        for name, value in (("COLUMNS", width), ("LINES", lines)):
            if value > 0:
                os.environ.setdefault(name, str(value))


def run_lesson(
    session: Session,
    lesson: Lesson,
    asked: ProgramOptions,
    constants: tuple[tuple[str, Value], ...],
) -> None:
    """Run the file of a lesson as `run` runs a script. Its tensors are on the backend's device.
    Ranks that somebody else has started are started again by them, not here."""
    session.restarts = 0 if rank_env_from() else lesson.restarts
    file = file_of(lesson.module)
    program = Program(
        name=str(file), path=path_of_new_interpreter(), constants=constants, uses_device=True
    )
    if prepare_start(session, asked):
        share_imports(file, parse_program(file))
        if lesson.needs_mnist:
            fork_client.preload(VISION)
        warm_up(session, asked)
    if lesson.needs_mnist:
        if session.world.is_main:  # the search for data may take a while
            click.echo(f"{lesson.name}: {lesson.teaches}", err=True)
        prepare_data(session)
    run_on_ranks(session, program, asked)


def prepare_data(session: Session) -> None:
    """Have the data on this host before a rank asks for it, and tell the ranks by the environment
    where it is. Digits replace MNIST where that is out of reach. Raises `NoData`."""
    from playground.training import prepare  # most lessons do without

    data = prepare.prepare_for_lessons(session.bar.announce)
    os.environ[prepare.DATA_DIR] = str(data.torchvision_root)
    if session.world.is_main:
        click.echo(f"data: {data}", err=True)
        if data.name != "mnist":
            click.echo(
                "These digits are drawn: losses and accuracies differ from the texts, which have "
                f"MNIST's. {prepare.MIRROR} may name a folder or an address that has MNIST.",
                err=True,
            )
