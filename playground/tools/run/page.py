"""The command `run`. Does not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click

from playground.base.constants import read_constants
from playground.base.errors import UsageError
from playground.base.flags import flag
from playground.base.remote import remote
from playground.tools import TOOLS
from playground.tools.run.options import (
    NO_LIMIT,
    ProgramOptions,
    program_options,
    read_settings,
    set_option,
)
from playground.tools.run.start import prepare_start, run_on_ranks, share_imports, warm_up
from playground.ui.misplaced import tell_misplaced
from playground.ui.options import pack_options, refuse
from playground.ui.session import Session, session_command
from playground.world.program import Program, parse_program, path_of_new_interpreter

TOOL = TOOLS["run"]
FIND_SET_ORDER = remote("playground.tools.doctor.set_order:find_set_order")
SAY_WHAT_WOULD_RUN = remote("playground.tools.run.dry:say_what_would_run")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The options of `run`."""

    is_module: bool = flag(
        False, "Run a module, as `python -m` does: its name is in the place of SCRIPT.", name="-m"
    )
    restarts: int = flag(
        0,
        "How often the ranks are started anew when one fails: TORCHELASTIC_RESTART_COUNT tells "
        "them.",
        least=0,
        most=10**6,
    )
    grace: float | None = flag(
        None,
        "Seconds that SIGTERM and Ctrl-C, which are passed on to the ranks, leave them to end; "
        "without it, a second.",
        above=0,
        below=NO_LIMIT,
    )
    spawn: bool = flag(
        False,
        "Give each rank an interpreter of its own, with its own hash seed, in place of a fork: "
        "starts as slowly as torchrun.",
    )
    dry: bool = flag(False, "Say what would be run, and what of it would fail, and run nothing.")


def to_torchrun(size: int, restarts: int, program: Program) -> str:
    """The command that does the same, but for what only we do."""
    more = ["--max-restarts", str(restarts)] if restarts else []
    return shlex.join(["torchrun", "--nproc-per-node", str(size), *more, *program.words])


@session_command(
    TOOL.name,
    click.argument(
        "words", metavar="SCRIPT.py [ARGS]…", nargs=-1, required=True, type=click.UNPROCESSED
    ),
    pack_options("settings", RunSettings),
    program_options(),
    set_option,
    refuse("as_json", why=lambda given: "" if given["dry"] else "is for --dry: leave it out"),
    only=("size", "gpus", "gpu_memory", "as_json", "see"),
    changed={"as_json": {"help": "With --dry, print one JSON document instead of text."}},
    short_help=TOOL.purpose,
    context_settings={"allow_interspersed_args": False},
)
def command(
    session: Session,
    words: Sequence[str],
    settings: RunSettings,
    asked: ProgramOptions,
    settings_of_constants: Sequence[str],
) -> None:
    """Run a script for torchrun on ranks of this machine, as it is: what follows its name is its
    own, and its environment is torchrun's. Under torchrun or Slurm, each process joins the world
    that is there.

    The first rank to fail is named, with its traceback; a deadlock ends the run as soon as it is
    proved; `why PID` examines a run that stands still. Processes that the script starts itself are
    not watched.

    \b
        python -m playground run -n 4 train.py --lr 0.1
        python -m playground run -n 4 -m package.train --lr 0.1
        python -m playground run --set EPOCHS=2 --set LR=0.1 train.py
        python -m playground run --see run.html --restarts 3 train.py
    """
    name, *arguments = words
    program = Program(
        name=name,
        is_module=settings.is_module,
        arguments=tuple(arguments),
        path=path_of_new_interpreter(),
    )
    session.restarts = settings.restarts
    world = session.world
    line = to_torchrun(world.size, settings.restarts, program)
    file = program.locate()
    if settings_of_constants and not (file and program.is_one_file):
        raise UsageError(f"--set: the text of {name} cannot be read here: name a file")
    if file:
        tree = parse_program(file)
        tell_misplaced(name, arguments, file.read_text("utf-8", "replace"))
        share_imports(file, tree)
        if settings_of_constants:
            constants = read_constants(file.read_bytes(), tree)
            values = read_settings(settings_of_constants, constants, file)
            program = replace(program, constants=tuple(values))
    if settings.dry:
        SAY_WHAT_WOULD_RUN(session, program, line, file, spawn=settings.spawn)
        return
    is_ours = prepare_start(session, asked)
    if is_ours and not settings.spawn:
        warm_up(session, asked)
        for fault in FIND_SET_ORDER(file) if file else []:
            note = f"{fault.saw}, which forks share: --spawn gives each rank its own"
            click.echo(f"playground: {note}", err=True)
    run_on_ranks(session, program, asked, spawn=settings.spawn, grace=settings.grace)
