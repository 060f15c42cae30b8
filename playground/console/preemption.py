"""What a command that trains does when its ranks have been asked to end, and have taken a snapshot: it says how to go
on, in a file beside the snapshots and on stderr."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from playground.console.session import Session
from playground.console.snapshot_options import SnapshotOptions
from playground.runtime.errors import Preempted
from playground.runtime.working_folder import working_folder
from playground.training.snapshots.marker import write_marker
from playground.training.snapshots.settings import AUTO


@contextlib.contextmanager
def resumable_if_preempted(session: Session, survival: SnapshotOptions, folder: Path | None) -> Iterator[None]:
    """Let `Preempted`, raised in here, go its way with a hint where to read how to go on; for the process that shows
    results, that is. The others of a world that was joined exit with the same code, without a word.

    The file lies in the run's `folder` of snapshots. It is written once on every host: each may have its own.
    """
    try:
        yield
    except Preempted as preemption:
        world = session.world
        if world.rank_env is None or world.rank_env.local_rank == 0:
            preemption.hint = leave_word(preemption, survival, folder, world.rank_env is not None)
        if not world.is_main:
            sys.exit(preemption.exit_code)
        raise


def leave_word(preemption: Preempted, survival: SnapshotOptions, folder: Path | None, joined: bool) -> str:
    """Write the file; return where it is, or why it is not."""
    if folder is None:
        return ""
    about = {
        "step": preemption.step, "signal": preemption.signal, "working folder": working_folder(),
        "command of each rank" if joined else "command": command_to_go_on(survival),
    }  # fmt: skip
    try:
        file = write_marker(folder, about)
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror})"
    return f"{file} says how to go on"


def command_to_go_on(survival: SnapshotOptions) -> str:
    """The command line of this process, but from the newest snapshot, whatever it went on from itself."""
    newest = () if survival.resume == AUTO else ("--resume", AUTO)
    return shlex.join(["python", "-m", "playground", *sys.argv[1:], *newest])
