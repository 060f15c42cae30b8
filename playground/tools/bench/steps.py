"""The command `bench steps`: time a training step with each gradient synchronisation. Does not
import torch."""

from __future__ import annotations

from typing import Any

from playground.console.options import COMMON
from playground.console.session import Session, session_command
from playground.console.step_times import OPTIONS, measure_steps
from playground.console.text import good, prose


@session_command(
    "steps",
    *OPTIONS,
    only=COMMON,
    short_help="time a training step with each gradient synchronisation, and with DDP",
)
def command(session: Session, **chosen: Any) -> None:
    """Time a training step with each gradient synchronisation of ours, by any all-reduce, and with
    DistributedDataParallel, in turns.

    Replicas of one model train side by side, each with its own synchronisation, and a clock on each
    part of a step. In every round each replica takes one step, in random order, so that ratios are
    meaningful even on a machine that is busy with other work. All replicas must end with the same
    parameters.

    \b
        python -m playground bench steps
        python -m playground bench steps --model resnet18 --link 1
        python -m playground bench steps --model bert --all-reduce shared-memory
    """
    times = measure_steps(session, **chosen)
    session.say(prose(f"Measured: {times.fastest}; {times.hidden}; ", good(times.verdict), "."))
    times.print_document(session)
