"""The command `snapshots`: lists snapshots, reads every file of them, and measures what one costs. Does not import
torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from playground.console.options import MemorySize, RunOptions, flags, options, run_options
from playground.console.paths import FilePath
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Cell, Column, Table, numbers
from playground.console.text import Prose, bad, good, prose
from playground.measurement import environment, format_bytes, format_digits
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_flags, flag
from playground.runtime.remote import remote
from playground.survival.disk import make_folder
from playground.survival.folder import DAMAGED, WHOLE, Examined, examine, find_steps, require_unused
from playground.tools import TOOLS

TOOL = TOOLS["snapshots"]
MEASURE = remote("playground.tools.snapshots.measure:measure")
DEFAULT_RANKS = 2
UNITS = ((86400, "days"), (3600, "h"), (60, "min"), (0, "s"))


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Raises `UsageError` for what cannot be measured."""

    folder: Path
    nbytes: int = flag(
        2**20,
        "Size of the state that all ranks share.",
        name="--memory",
        least=1,
        click={"type": MemorySize(), "show_default": "1MiB"},
    )
    """Bytes; each rank adds the state of its random number generator."""
    saves: int = flag(5, "Snapshots to take.", least=1)
    keep: int = flag(3, "Snapshots to keep.", least=1)

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def fingerprint(self) -> dict[str, object]:
        return {"nbytes": self.nbytes}


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """Time that the saves of one rank took, save by save."""

    blocked: list[float]
    """Seconds for which training waits: for the copy."""
    written: list[float]
    """Seconds until the rank's files are on the disk."""
    problem: str
    """Why a save has failed; empty if none has."""


def examine_folder(folder: Path, *, read_contents: bool) -> list[Examined]:
    """All snapshots in `folder`, the oldest first. Raises `UsageError` if there is none."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: give one that a run has written snapshots into")
    found = [examine(folder, step, read_contents=read_contents) for step in reversed(find_steps(folder))]
    if found := [each for each in found if each.folder.is_dir()]:  # a run may have removed some meanwhile
        return found
    raise UsageError(f"{folder} holds no snapshots: give a folder with step-… in it, which a run has written")


def find_last_whole(snapshots: Sequence[Examined]) -> Examined | None:
    """The snapshot that a run would resume from."""
    return next((each for each in reversed(snapshots) if each.condition == WHOLE), None)


def check_all(snapshots: Sequence[Examined]) -> None:
    """Raise `PlaygroundError` if a snapshot is damaged, or none is whole. An incomplete one alone is no failure: a run
    that is killed leaves one."""
    if damaged := [str(each.step) for each in snapshots if each.condition == DAMAGED]:
        raise PlaygroundError(f"damaged: step{'s' * (len(damaged) > 1)} {', '.join(damaged)}")
    if not find_last_whole(snapshots):
        raise PlaygroundError("no snapshot is whole: a run cannot go on from here")


def check_times(times: Sequence[SaveTimes]) -> None:
    """Raise `PlaygroundError` if a rank could not save."""
    if problem := next((each.problem for each in times if each.problem), ""):
        raise PlaygroundError(problem)


def snapshots_table(snapshots: Sequence[Examined]) -> Table:
    """One row per snapshot, the oldest first."""
    table = Table(*numbers("step", "ranks", "size", "age"), Column("condition", wraps=True))
    now = time.time()
    for each in snapshots:
        age = "-" if each.written is None else format_age(now - each.written)
        text = f"{each.condition}: {'; '.join(each.defects)}"
        condition: Cell = {WHOLE: good(WHOLE), DAMAGED: bad(text)}.get(each.condition, text)
        table.add(f"{each.step:,}", str(each.size or "-"), format_bytes(each.nbytes), age, condition)
    return table


def format_age(seconds: float) -> str:
    """Age in the largest unit of which two have passed: 90 s, 3 min, 47 h, 2 days; never negative, even after a clock
    was set back."""
    length, unit = next(((length, unit) for length, unit in UNITS if seconds >= 2 * length), UNITS[-1])
    return f"{max(0, seconds) / (length or 1):.0f} {unit}"


def summary_text(snapshots: Sequence[Examined], *, read_contents: bool) -> Prose:
    """How many are whole, and how far they were looked at."""
    whole = sum(each.condition == WHOLE for each in snapshots)
    how = "every file read and its checksum compared" if read_contents else "lengths compared; verify compares contents"
    last = find_last_whole(snapshots)
    going_on = f"A run would go on from step {last.step:,}." if last else "No run can go on from here."
    return prose(f"Shown: {whole} of {len(snapshots)} snapshots are whole ({how}). {going_on}")


def times_table(times: Sequence[SaveTimes]) -> Table:
    """One row per rank: the time that its saves took."""
    headings = ("blocked,\nfirst", "ms"), ("blocked,\nmedian", "ms"), ("on the disk,\nmedian", "ms")
    table = Table(RANK_COLUMN, *numbers(*headings))
    for rank, each in enumerate(times):
        seconds = (each.blocked[0], median(each.blocked), median(each.written))
        table.add(str(rank), *(format_digits(1000 * value) for value in seconds))
    return table


folder_argument = click.argument("folder", type=FilePath())
look_options = options(folder_argument, flags(RunOptions, "wide", "as_json"))


@click.group(TOOL.name, short_help=TOOL.purpose)
def command() -> None:
    """Look at the snapshots that a training run has written, or measure what one costs.

    \b
        python -m playground snapshots measure try
        python -m playground snapshots ls try
        python -m playground snapshots verify try
    """


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
@flags(MeasureSettings)
@run_options(DEFAULT_RANKS)
def measure_saves(folder: Path, run: RunOptions, **chosen: int) -> None:
    """Have ranks take snapshots into FOLDER, and measure for how long each blocks them and when it lies on the disk."""
    session = Session(TOOL.name, run, default_size=DEFAULT_RANKS)
    settings = MeasureSettings(folder=folder.absolute(), **chosen)
    memory, available = settings.nbytes, environment.memory("MemAvailable")
    if memory * session.world.local_size > available:
        raise UsageError(
            f"--memory {memory:,} bytes on {session.world.local_size} ranks: {available:,} bytes are free, choose less"
        )
    make_folder(folder)
    require_unused(folder)
    session.say(
        f"{TOOL.name}: {session.world}", f"{settings.saves} snapshots of {format_bytes(memory)} in {folder}", ""
    )
    with session.bar() as bar:
        times = session.world.run(MEASURE, settings, on_report=bar)
    session.say(times_table(times))
    session.print_document({"measure": times}, memory=memory)
    check_times(times)
    blocked, written = (1000 * max(max(getattr(each, name)) for each in times) for name in ("blocked", "written"))
    most = f"a save kept its rank for {blocked:.3g} ms at most"
    session.say("", f"Shown: {most}; its files lay on the disk within {written:.3g} ms.")
