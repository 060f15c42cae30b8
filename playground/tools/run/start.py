"""From a command to the ranks of a program, a script or a lesson. Does not import torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from playground.console.session import Session
from playground.explain.cost.run import measured
from playground.runtime.errors import UsageError
from playground.runtime.launcher.output import file_name
from playground.runtime.program import Program
from playground.runtime.remote import remote
from playground.tools.run.options import FILES, NO_LIMIT, ProgramOptions

RUN_PROGRAM = remote("playground.runtime.program:run_program")


def prepare_start(session: Session, asked: ProgramOptions) -> bool:
    """What comes before the ranks of a program, if they are ours to start. Returns whether they
    are. Raises `UsageError` where files for their output cannot be made."""
    world = session.world
    if world.rank_env is not None:
        return False
    if world.size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
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
    """Run the program on the ranks of the session's world. Raises what `launch` raises, and
    `UsageError` if its cost cannot be measured, or a link not be simulated."""
    world = session.world
    world.around = measured(world, asked.profile, asked.link)
    is_ours = world.rank_env is None
    run = str(uuid.uuid4()) if is_ours else ""
    world.run(
        RUN_PROGRAM, program, run, session.restarts,
        bare=True, spawn=spawn, output=asked.output, grace=grace,
        timeout=asked.timeout or NO_LIMIT,
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
