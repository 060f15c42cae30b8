"""The command `play`: IPython in a terminal, with ranks that stay. Does not import torch."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass

import click

from playground.base.errors import UsageError
from playground.base.flags import flag, like
from playground.base.signals import TERMINATING
from playground.explain.right import CERTAIN, OFF
from playground.play import PLAY
from playground.play.world import OPERATION_LIMIT
from playground.ui.options import flags
from playground.ui.run_options import RunOptions
from playground.ui.session import Session, session_command
from playground.world.launcher import fork_client

PATIENCE = 3.0
"""Seconds after which a start is told of: torch is read from a disk, perhaps, or the machine is
busy."""


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Options of `play` besides those of every world."""

    timeout: float = like(
        RunOptions,
        "timeout",
        OPERATION_LIMIT,
        help="Seconds that an operation waits for other ranks, if it cannot be proved before that "
        "they do not come.",
    )
    check: str = flag(
        CERTAIN,
        "Tell of silent mistakes in cells that train: those that are certain, or none (off).",
        choices=(OFF, CERTAIN),
    )


@session_command(
    PLAY.name,
    flags(PlayOptions),
    only=("size", "backend", "gpus", "gpu_memory"),
    size=4,
    short_help=PLAY.purpose,
)
def command(session: Session, timeout: float, check: str) -> None:
    """A prompt whose every cell runs on all ranks of a world that stays. A deadlock is explained,
    the ranks are let go, and their variables are as they were.

    \b
        python -m playground play -n 4
        [0-3] In [1]: x = torch.tensor([10.0 ** rank]); dist.all_reduce(x); x
        [0-3] tensor([1111.])
    """
    if session.world.rank_env:
        raise UsageError(
            f"{PLAY.name} starts a world of its own: run it without torchrun, RANK and WORLD_SIZE"
        )
    soon = threading.Timer(PATIENCE, click.echo, ["the ranks are starting: they import torch"])
    soon.daemon = True
    soon.start()
    fork_client.warm_up()
    # imported while the ranks' server imports torch
    from IPython.terminal.ipapp import TerminalIPythonApp

    from playground.play.extension import load

    # IPython's prompt handles Ctrl-C; what else ends this process ends its ranks, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in TERMINATING:
        signal.signal(number, signal.SIG_DFL)
    app = TerminalIPythonApp.instance(display_banner=False, exec_PYTHONSTARTUP=False)
    app.initialize([])
    app.shell.confirm_exit = False
    magics = load(app.shell)
    try:
        world = session.world
        about = magics.start(
            world.size, backend=world.backend, timeout=timeout, checks=check != OFF
        )
        soon.cancel()
        click.echo(about)
        app.start()
    finally:
        soon.cancel()
        magics.close()
