"""The command `see`: it shows a recorded run, and draws the figures of tutorials from runs of its own."""

from __future__ import annotations

import os
from pathlib import Path

import click

from playground.console.options import RunOptions, flags
from playground.console.paths import FilePath, check_writable
from playground.console.session import Session
from playground.console.tables import Column, Table
from playground.runtime.errors import UsageError
from playground.runtime.host import cores
from playground.see import SEE
from playground.see.analyse.overlap import overlaps
from playground.see.analyse.transfers import volumes
from playground.see.analyse.waits import Waits, seconds_by_cause
from playground.see.atlas import ALL, RUNS, all_files, chapter_files, paint_figures
from playground.see.files import PAGE, PAINTED, amount, paint, paint_steps, write_page
from playground.see.paint.painters import SCENE_PAINTERS, check_ending
from playground.see.paint.words import plural, recording_texts
from playground.see.record import Recording
from playground.see.record.run import RECORDED, read_recording


@click.command(SEE.name, short_help=SEE.purpose)
@click.argument("file", type=FilePath(), required=False)
@click.option(
    "-o",
    "--output",
    type=FilePath(),
    metavar="OUT",
    help="Paint FILE: .html plays it, .svg and .png are pictures, .txt is words, .json is a trace for Perfetto.",
)
@click.option(
    "--race", type=FilePath(), metavar="OTHER", help="With -o OUT.html: another recording, on the same clock."
)
@click.option("--steps", is_flag=True, help="With -o, in a picture: logical steps in place of seconds.")
@click.option(
    "--figure",
    "figures",
    type=(click.Choice(tuple(ALL), case_sensitive=False), FilePath()),
    multiple=True,
    metavar="NAME OUT",
    help="Run what a figure is drawn from, F1 to F21 of the tutorials or a chapter's, and paint it.",
)
@click.option("--all", "folder", type=FilePath(), metavar="DIR", help="All figures of the tutorials, into a folder.")
@click.option("--chapters", is_flag=True, help="The pictures of the chapters' READMEs, where they stand.")
@flags(RunOptions, "wide", "as_json")
def command(
    file: Path | None,
    output: Path | None,
    race: Path | None,
    steps: bool,
    figures: tuple[tuple[str, Path], ...],
    folder: Path | None,
    chapters: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """Look at a run that was recorded with --see, or draw every figure of the tutorials from runs on this machine.

    \b
        python -m playground allreduce --algorithm ring --see ring.playground
        python -m playground see ring.playground
        python -m playground see ring.playground -o ring.html
        python -m playground see ring.playground -o ring.svg --steps
        python -m playground see --figure F9 ring.svg
        python -m playground see --all figures
    """
    choices = {"FILE": file, "--figure": figures, "--all": folder, "--chapters": chapters}
    asked = [name for name, value in choices.items() if value]
    if len(asked) != 1:
        given = " and ".join(asked) if asked else "nothing"
        raise UsageError(f"{given} to be seen: name one of a FILE, --figure NAME OUT, --all DIR and --chapters")
    for option, value in (("-o", output), ("--race", race), ("--steps", steps)):
        if value and not file:
            raise UsageError(f"{option} is for a recording, not for {asked[0]}: leave it out")
    session = Session(SEE.name, RunOptions(wide=wide, as_json=as_json), default_size=1)
    if file:
        see_file(session, file, output, race, steps)
    else:
        see_figures(session, files_of(dict(figures), folder, chapters))


def see_file(session: Session, file: Path, output: Path | None, race: Path | None, steps: bool) -> None:
    """Print a recording in words, or paint it."""
    check_output(output, race, steps)
    recording = read(file)
    session.say(f"{SEE.name}: {file}" + (f", beside {race}" if race else ""), "")
    other = read(race) if race else None
    if output and other:
        write_page(recording, output, other=other)
    elif output:
        (paint_steps if steps else paint)(recording, output)
    else:
        session.say(*recording_texts(recording), "")
    shown = " beside ".join(amount(each) for each in (recording, other) if each)
    session.say(f"Shown: {shown}{f', in {output}' if output else ''}.")
    if session.run.as_json:
        session.print_document({}, file=output, **document_of(recording))


def check_output(output: Path | None, race: Path | None, steps: bool) -> None:
    """Raise `UsageError`, before anything is read, for an output that could not be painted."""
    if race and (output is None or output.suffix != PAGE):
        raise UsageError(f"--race {race}: two runs are raced on a page, so -o must name one that ends in {PAGE}")
    if steps and (output is None or output.suffix not in SCENE_PAINTERS):
        raise UsageError(f"--steps is for a picture, so -o must name one that ends in {' or '.join(SCENE_PAINTERS)}")
    if output:
        check_ending(output, PAINTED, "-o")
        check_writable("-o", output)


def read(file: Path) -> Recording:
    """Read a recording. Raises `UsageError` if it is none, or cannot be read."""
    try:
        return read_recording(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def document_of(recording: Recording) -> dict[str, object]:
    """The recording as JSON."""
    waits = Waits(recording)
    ranks = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "events": len(rank.events),
            "dropped": rank.dropped,
            "is_cut_off": rank.is_cut_off,
            "clock_bound": rank.clock_bound,
            "waits": None
            if rank.runs_ahead
            else seconds_by_cause([wait for wait in waits.all if wait.event.rank == rank.rank]),
        }
        for rank in recording.ranks
    ]
    return {
        "command": recording.command,
        "versions": recording.versions,
        "seconds_recorded": recording.end,
        "ranks": ranks,
        "overlap": overlaps(recording),
        "volumes": volumes(recording),
    }


def files_of(figures: dict[str, Path], folder: Path | None, chapters: bool) -> dict[str, Path]:
    """The files of the figures that were asked for. Raises `UsageError` if one cannot be written."""
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--all {folder} cannot be created: {error.strerror}") from None
    if chapters:
        refuse_busy_machine()
    files = figures or (all_files(folder) if folder else chapter_files())
    files = {name: file.absolute() for name, file in files.items()}
    flag = "--figure" if figures else "--all" if folder else "--chapters"
    for file in files.values():
        check_ending(file, tuple(SCENE_PAINTERS), flag)
        check_writable(flag, file)
    return files


def refuse_busy_machine() -> None:
    """Raise `UsageError` where other programs compute too: the chapters' figures show times."""
    load = os.getloadavg()[0]
    if load > cores() / 2:
        raise UsageError(f"this machine is busy (load {load:.1f} on {cores()} cores), and figures show times: wait")


def see_figures(session: Session, files: dict[str, Path]) -> None:
    """Make the runs of these figures, paint them, and print their files. Raises `UsageError` in a joined world."""
    if session.world.rank_env:
        raise UsageError("figures are drawn from worlds of their own: start this as one process, not as a rank")
    runs = {ALL[name].run for name in files}
    session.say(f"{SEE.name}: {plural(len(runs), 'run')} on this machine, for {plural(len(files), 'figure')}", "")
    session.world.warm_up(RECORDED, *(RUNS[run].work for run in runs))
    with session.bar() as bar:
        painted = paint_figures(files, bar.show)
    folder = Path(os.path.commonpath([figure.file.parent for figure in painted]))
    table = Table(Column("figure"), Column("shows", wraps=True), Column("file"))
    for figure in painted:
        table.add(figure.name, figure.shows, str(figure.file.relative_to(folder)))
    session.say(table, "")
    session.say(f"Shown: {plural(len(painted), 'figure')}, in {folder}.")
    session.print_document({}, figures=painted)
