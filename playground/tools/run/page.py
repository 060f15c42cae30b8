"""The command `run`. Does not import torch."""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.console.options import FILE, pack_options, refuse
from playground.console.session import Session, session_command
from playground.explain.cost.run import measured
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag
from playground.runtime.launcher import server
from playground.runtime.launcher.output import EVERY_RANK, FIRST_RANK, file_name
from playground.runtime.program import Program, find_shared_imports, parse, path_of_new_interpreter
from playground.runtime.remote import remote
from playground.tools import TOOLS
from playground.tools.doctor import run_checks, script
from playground.tools.doctor.page import finding_text

TOOL = TOOLS["run"]
RUN_PROGRAM = remote("playground.runtime.program:run_program")
NO_LIMIT = 999_999.0
"""Seconds of silence after which a run is ended unless --timeout says so: a script that trains may
say nothing for hours."""
FILES = "files"
OUTPUTS = (EVERY_RANK, FIRST_RANK, FILES)


class OutputOption(click.Option):
    """An option whose value `files` is followed by a folder."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        option = parser._long_opt["--output"]
        store = option.process

        def process(value: str, state: Any) -> None:
            if value == FILES and state.rargs:
                value = f"{FILES} {state.rargs.pop(0)}"
            store(value, state)

        option.process = process


def read_output(ctx: click.Context, param: click.Parameter, value: str) -> str | Path:
    """The value of `LaunchConfig.output`."""
    kind, _, folder = value.partition(" ")
    if kind not in OUTPUTS or (kind == FILES) != bool(folder):
        raise click.BadParameter(f"{value!r} is none of {', '.join(OUTPUTS)} DIR.")
    return FILE.convert(folder, param, ctx) if folder else kind


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    is_module: bool = flag(
        False, "Run a module, as `python -m` does: its name is in the place of SCRIPT.", name="-m"
    )
    timeout: float | None = flag(
        None,
        "Seconds after which a run is ended in which no rank prints or reports anything; without "
        "it, only a proved deadlock ends it.",
        above=0,
        below=NO_LIMIT,
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
    profile: Path | None = flag(
        None,
        "Say what communication costs, by line of the program: calls, bytes sent, time waited, "
        "time hidden. FILE.json gets it as a document, FILE.html as a page.",
        endings=(".json", ".html"),
    )
    link: float | None = flag(
        None,
        "Simulate a link of so many 10^9 bits per second out of each rank, under every call.",
        metavar="GBIT",
        above=0,
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
    click.option(
        "--output",
        cls=OutputOption,
        default=EVERY_RANK,
        show_default=True,
        callback=read_output,
        metavar="ranks|first|files DIR",
        help="Whose output is shown: that of all ranks, or of rank 0; or write it to DIR, a file "
        "for each rank and stream.",
    ),
    refuse("as_json", why=lambda given: "" if given["dry"] else "is for --dry: leave it out"),
    only=("size", "as_json", "see"),
    short_help=TOOL.purpose,
    context_settings={"allow_interspersed_args": False},
)
def command(
    session: Session, words: Sequence[str], settings: RunSettings, output: str | Path
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
    is_ours = world.rank_env is None
    line = to_torchrun(world.size, settings.restarts, program)
    file = program.locate()
    findings = []
    if file:
        server.preload(*find_shared_imports(parse(file)))
        facts = script.ScriptFacts(path=file, folder="", runs=(), operations=())
        findings = [*run_checks(script.TEXT_CHECKS, facts)]
    if settings.dry:
        kind = "an interpreter of its own" if settings.spawn else "a fork of one that has torch"
        session.say(
            f"{TOOL.name}: {world.size} ranks, each {kind}, in {os.getcwd()}",
            f"  {shlex.join(program.words)}",
            f"as does: {line}",
            f"checks of its text: {len(script.TEXT_CHECKS)}, {len(findings)} found something",
            *map(finding_text, findings),
        )
        session.print_document({}, torchrun=line, folder=os.getcwd(), findings=findings)
        return
    if is_ours:
        if world.size > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        if isinstance(output, Path):
            make_files(output, world.size)
        if not settings.spawn:
            world.warm_up(RUN_PROGRAM)
    for finding in findings:
        if finding.check == "set-order" and is_ours and not settings.spawn:
            note = f"{finding.saw}, which forks share: --spawn gives each rank its own"
            click.echo(f"playground: {note}", err=True)
    world.around = measured(world, settings.profile, settings.link)
    run = str(uuid.uuid4()) if is_ours else ""
    world.run(
        RUN_PROGRAM, program, run, settings.restarts,
        bare=True, spawn=settings.spawn, output=output, grace=settings.grace,
        timeout=settings.timeout or NO_LIMIT,
    )  # fmt: skip


def make_files(folder: Path, size: int) -> None:
    """Make the files for the output of ranks, empty. Raises `UsageError` where they cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(size):
            for stream in ("stdout", "stderr"):
                (folder / file_name(rank, stream)).write_bytes(b"")
    except OSError as error:
        raise UsageError(f"--output {FILES} {folder}: {error.strerror}") from None
