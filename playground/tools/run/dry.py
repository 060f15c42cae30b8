"""`run --dry`: what would be run, and what the text of the script shows. Does not import torch."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from playground.tools import TOOLS
from playground.tools.doctor.data_parallel.plan import plan_of_text
from playground.tools.doctor.page import fault_text
from playground.tools.doctor.script import TEXT_CHECKS, check_device, check_text
from playground.ui.session import Session
from playground.world.program import Program

NOT_LOOKED_AT = (
    "not looked at: what it calls and how it trains, as nothing was run; doctor SCRIPT does that"
)
NOT_YET = "not data parallel yet: python -m playground doctor {}"


def say_what_would_run(
    session: Session, program: Program, torchrun: str, file: Path | None, *, spawn: bool
) -> None:
    """Say what `run` would run, the command of torchrun that does the same, and what is found in
    the text of the script, which is in `file` if it can be read."""
    kind = "an interpreter of its own" if spawn else "a fork of one that has torch"
    is_for_gpus = session.run.gpus or (file and re.search(rb"cuda|\bGPU", file.read_bytes(), re.I))
    asked = [check for check in TEXT_CHECKS if is_for_gpus or check is not check_device]
    faults = check_text(file, asked) if file else []
    names = (check.__name__.removeprefix("check_") for check in asked)
    checks = ", ".join(names).replace("_", " ")
    found = f"{len(faults)} found something" if faults else "nothing found"
    session.say(
        f"{TOOLS['run'].name}: {session.world.size} ranks, each {kind}, in {os.getcwd()}",
        f"  {shlex.join(program.words)}",
        f"as does: {torchrun}",
        f"{len(asked)} checks of its text ({checks}): {found}",
        *map(fault_text, faults),
        *([NOT_YET.format(file)] if file and plan_of_text(file) else []),
        NOT_LOOKED_AT,
    )
    session.print_document({}, torchrun=torchrun, folder=os.getcwd(), faults=faults)
