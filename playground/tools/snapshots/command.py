"""The command that looks at snapshots: lists them, reads every file of them, and measures what one costs."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console.memory_cap import MemorySize
from playground.console.options import RunOptions, json_option, options, run_options, wide_option
from playground.console.paths import FilePath
from playground.console.session import Session
from playground.measurement import environment
from playground.measurement.units import format_bytes
from playground.runtime.errors import UsageError
from playground.runtime.remote import remote
from playground.tools import TOOLS
from playground.tools.snapshots.report import snapshots_table, summary_text, times_summary, times_table
from playground.tools.snapshots.results import check_all, check_times, examine_folder
from playground.tools.snapshots.settings import MeasureSettings
from playground.training.snapshots.disk import make_folder
from playground.training.snapshots.folder import require_unused

TOOL = TOOLS["snapshots"]
MEASURE = remote("playground.tools.snapshots.measure:measure")
DEFAULT_RANKS = 2
folder_argument = click.argument("folder", type=FilePath())


@click.group(TOOL.name, short_help=TOOL.purpose)
def command() -> None:
    """Look at the snapshots that a training run has written, or measure what one costs.

    \b
        python -m playground snapshots measure try
        python -m playground snapshots ls try
        python -m playground snapshots verify try
    """


look_options = options(folder_argument, wide_option, json_option)


@command.command("ls", short_help="list snapshots, and which are whole")
@look_options
def list_snapshots(folder: Path, wide: bool, as_json: bool) -> None:
    """List the snapshots in FOLDER: step, number of ranks, size, age, and whether all files are there."""
    show_snapshots(folder, RunOptions(wide=wide, as_json=as_json), read_contents=False)


@command.command(short_help="read every file, and compare checksums")
@look_options
def verify(folder: Path, wide: bool, as_json: bool) -> None:
    """Read every file of the snapshots in FOLDER and compare checksums.

    Exit code 1 if a snapshot is damaged or none is whole.
    """
    show_snapshots(folder, RunOptions(wide=wide, as_json=as_json), read_contents=True)


def show_snapshots(folder: Path, run: RunOptions, *, read_contents: bool) -> None:
    session = Session(TOOL.name, run, default_size=1)
    snapshots = examine_folder(folder, read_contents=read_contents)
    session.say(f"{TOOL.name}: {folder}", "", snapshots_table(snapshots), "")
    session.say(summary_text(snapshots, read_contents=read_contents))
    session.print_document({}, contents_read=read_contents, snapshots=snapshots)
    if read_contents:
        check_all(snapshots)


@command.command("measure", short_help="measure what a snapshot costs")
@folder_argument
@click.option(
    "--memory",
    type=MemorySize(),
    default=MeasureSettings.nbytes,
    show_default="1MiB",
    help="Size of the state that all ranks share.",
)
@click.option(
    "--saves", type=click.IntRange(1), default=MeasureSettings.saves, show_default=True, help="Snapshots to take."
)
@click.option(
    "--keep", type=click.IntRange(1), default=MeasureSettings.keep, show_default=True, help="Snapshots to keep."
)
@run_options(DEFAULT_RANKS)
def measure_saves(folder: Path, memory: int, saves: int, keep: int, run: RunOptions) -> None:
    """Have ranks take snapshots into FOLDER, and measure for how long each blocks them and when it lies on the disk."""
    session = Session(TOOL.name, run, default_size=DEFAULT_RANKS)
    settings = MeasureSettings(folder=folder.absolute(), nbytes=memory, saves=saves, keep=keep)
    available = environment.memory("MemAvailable")
    if memory * session.world.local_size > available:
        raise UsageError(
            f"--memory {memory:,} bytes on {session.world.local_size} ranks: {available:,} bytes are free, choose less"
        )
    make_folder(folder)
    require_unused(folder)
    session.say(f"{TOOL.name}: {session.world}", f"{saves} snapshots of {format_bytes(memory)} in {folder}", "")
    with session.bar() as bar:
        times = session.world.run(MEASURE, settings, on_report=bar)
    session.say(times_table(times))
    session.print_document({"measure": times}, memory=memory)
    check_times(times)
    session.say("", times_summary(times))
