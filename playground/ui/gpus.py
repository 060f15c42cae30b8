"""The options --gpus and --gpu-memory: a run on GPUs that are not there. Does not import torch."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from playground.base import signals
from playground.base.errors import UsageError
from playground.ui.run_options import RunOptions
from playground.world import backends
from playground.world.rendezvous.environment import rank_env_from
from playground.world.simulated_gpu.environment import environment_with, has_begun_with

REAL = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What the driver of real GPUs has on Linux, and in WSL."""

STARTED_AGAIN = "PLAYGROUND_STARTED_AGAIN"
"""The environment variable with the id of a process that has been started again, once."""


def on_simulated_gpus(run: RunOptions) -> RunOptions:
    """The options of a run whose process sees `run.gpus` simulated GPUs: their backend is that of
    GPUs. A process that does not see them is started again, as a process has to begin with them.
    Raises `UsageError` where that cannot be."""
    gpus = run.gpus
    assert gpus
    place = rank_env_from()
    if place and place.local_size < place.size:
        raise UsageError(
            f"--gpus {gpus} with ranks on several hosts: simulated GPUs are connected inside "
            "one host only"
        )
    run = replace(run, backend=backend_on_gpus(run.backend))
    environ = environment_with(gpus, run.gpu_memory)
    if not has_begun_with(environ):
        start_again(environ)
    if signals.speaks():
        several = f"{gpus} simulated GPU{'s' if gpus > 1 else ''}"
        is_hidden = any(each.exists() for each in REAL)
        beside = ", and this machine's own are hidden" if is_hidden else ""
        click.echo(
            f"playground: {several}: computed by the CPU, no measure of speed{beside}", err=True
        )
    return run


def backend_on_gpus(asked: str) -> str:
    """The backend of a run on GPUs. Raises `UsageError` if one of CPUs was asked for."""
    of_gpus = backends.backend_for("cuda").name
    given = click.get_current_context().get_parameter_source("backend")
    if given is None or asked == of_gpus:  # `run` leaves the backend to its script
        return asked
    if given is ParameterSource.COMMANDLINE:
        raise UsageError(
            f"--gpus has no effect with --backend {asked}: it is for --backend {of_gpus}"
        )
    return of_gpus


def start_again(environ: dict[str, str]) -> None:
    """Run this program from its beginning, as the same process, in another environment. Raises
    `UsageError` where that is of no use."""
    if "torch" in sys.modules:
        raise UsageError(
            "--gpus: this process has imported PyTorch, and would have to begin with simulated "
            "GPUs: give the command in a shell"
        )
    if os.environ.get(STARTED_AGAIN) == str(os.getpid()):
        raise UsageError(
            "--gpus: this Python does not load what LD_PRELOAD names: use one that is linked "
            "dynamically"
        )
    environ[STARTED_AGAIN] = str(os.getpid())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
