"""The command `see`: it shows a recorded run, and draws the figures of the field's tutorials, each
from a run on this machine. A run is made once, however many figures are drawn from it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from playground.base.errors import UsageError
from playground.base.files import temporary_folder
from playground.base.flags import flag
from playground.base.host import cores
from playground.base.remote import ROOT
from playground.explain.replay.analyse.waits import Waits, seconds_by_cause
from playground.explain.replay.files import (
    RENDERED,
    amount,
    check_ending,
    render,
    render_scene,
    render_steps,
)
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import Recording
from playground.explain.replay.record.run import RECORDED
from playground.explain.replay.render.text_report import recording_texts
from playground.figures import SEE
from playground.figures.catalogue import FIGURES
from playground.ui.option_types import FILE
from playground.ui.options import flags
from playground.ui.paths import check_writable
from playground.ui.session import Session, session_command
from playground.ui.tables import Column, Table
from playground.ui.units import plural

PICTURE = ".svg"
OPENED = {
    ".html": "open it in a browser",
    PICTURE: "open it in a browser",
    ".json": "open it at https://ui.perfetto.dev",
    ".txt": "it is text",
}
"""What to do with a file that a recording was rendered into, by its ending."""


@dataclass(frozen=True, kw_only=True)
class SeeOptions:
    """The options of `see`."""

    output: Path | None = flag(
        None,
        "Render FILE: .html plays it, .svg is a picture, .txt is words, .json is a trace for "
        "Perfetto.",
        name="-o --output",
        metavar="OUT",
    )
    steps: bool = flag(False, "With -o, in a picture: logical steps in place of seconds.")
    figures: tuple[tuple[str, Path], ...] = flag(
        (),
        "Run what a figure is drawn from, F1 to F21 of the tutorials or a chapter's, and "
        "render it.",
        name="--figure",
        choices=FIGURES,
        metavar="NAME OUT",
    )
    chapters: bool = flag(False, "The pictures of the chapters' READMEs, where they stand.")


@session_command(
    SEE.name,
    click.argument("file", type=FILE, required=False),
    flags(SeeOptions),
    only=("wide", "as_json"),
    size=1,
    short_help=SEE.purpose,
)
def command(
    session: Session,
    file: Path | None,
    output: Path | None,
    steps: bool,
    figures: tuple[tuple[str, Path], ...],
    chapters: bool,
) -> None:
    """Look at a run that was recorded with --see, or draw every figure of the tutorials from runs
    on this machine.

    \b
        python -m playground allreduce --see ring.playground
        python -m playground see ring.playground
        python -m playground see ring.playground -o ring.html
        python -m playground see ring.playground -o ring.svg --steps
        python -m playground see --figure F9 ring.svg
    """
    choices = {"FILE": file, "--figure": figures, "--chapters": chapters}
    asked = [name for name, value in choices.items() if value]
    if len(asked) != 1:
        raise UsageError(
            f"{' and '.join(asked)}: give one of them"
            if asked
            else "nothing to show: give a FILE.playground, --figure NAME OUT or --chapters"
        )
    for option, value in (("-o", output), ("--steps", steps)):
        if value and not file:
            raise UsageError(f"{option} is for a recording, not for {asked[0]}: leave it out")
    if file:
        see_file(session, file, output, steps)
    else:
        see_figures(session, files_of(dict(figures), chapters))


def see_file(session: Session, file: Path, output: Path | None, steps: bool) -> None:
    """Print a recording in words, or render it. Raises `UsageError`, before it is read, if it could
    not be rendered, or has been."""
    if file.suffix in OPENED and file.is_file():
        raise UsageError(
            f"{file} shows a recording and is none: {OPENED[file.suffix]}. {SEE.name} takes the "
            "FILE of --see FILE.playground"
        )
    if steps and (output is None or output.suffix != PICTURE):
        raise UsageError(f"--steps is for a picture, so -o must name one that ends in {PICTURE}")
    if output:
        check_ending(output, RENDERED, "-o")
        check_writable("-o", output)
    recording = read_recording(file)
    session.say(f"{SEE.name}: {file}", "")
    if output:
        if steps:
            render_steps(recording, output)
        else:
            render(recording, output)
    else:
        session.say(*recording_texts(recording), "")
    session.say(f"{f'{output} has ' if output else ''}{amount(recording)}.")
    if session.run.as_json:
        session.print_document({}, file=output, **document_of(recording))


def document_of(recording: Recording) -> dict[str, object]:
    """The recording as JSON."""
    waits, ranks = Waits(recording), []
    for rank in recording.ranks:
        its = [wait for wait in waits.all if wait.event.rank == rank.rank]
        waited = None if rank.runs_ahead else seconds_by_cause(its)
        about = {
            "rank": rank.rank,
            "events": len(rank.events),
            "dropped": rank.dropped,
            "is_cut_off": rank.is_cut_off,
        }
        ranks.append({**about, "waits": waited})
    return {
        "command": recording.command,
        "versions": recording.versions,
        "seconds_recorded": recording.end,
        "ranks": ranks,
    }


def files_of(figures: dict[str, Path], chapters: bool) -> dict[str, Path]:
    """The files of the figures that were asked for. Raises `UsageError` if one cannot be
    written."""
    flag, files = "--figure", figures
    if chapters:
        load = os.getloadavg()[0]
        if load > cores() / 2:
            raise UsageError(
                f"this machine is busy (load {load:.1f} on {cores()} cores), and figures show "
                "times: wait"
            )
        flag, files = "--chapters", chapter_files()
    for file in files.values():
        check_ending(file.absolute(), (PICTURE,), flag)
        check_writable(flag, file.absolute())
    return {name: file.absolute() for name, file in files.items()}


def chapter_files() -> dict[str, Path]:
    """The pictures of the chapters' READMEs, by the figure's name."""
    return {
        name: ROOT / "playground" / f"{figure.path}.svg"
        for name, figure in FIGURES.items()
        if figure.in_chapter
    }


def see_figures(session: Session, files: dict[str, Path]) -> None:
    """Make the runs of these figures, render them, and print their files. Raises `UsageError` in a
    joined world or for a file that cannot be written, and what `launch` raises."""
    if session.world.rank_env:
        raise UsageError(
            "figures are drawn from worlds of their own: start this as one process, not as a rank"
        )
    figures = [FIGURES[name] for name in files]
    runs, titles = {each.run.name: each.run for each in figures}, dict[str, str]()
    count = plural(len(files), "figure")
    session.say(f"{SEE.name}: {plural(len(runs), 'run')} on this machine, for {count}", "")
    session.world.warm_up(RECORDED, *(run.work for run in runs.values()))
    with session.bar as bar, temporary_folder("figures") as folder:
        for number, (name, run) in enumerate(runs.items()):
            bar.show(f"running {name}", number, len(runs))
            evidence = run.make(folder)
            for figure in figures:
                if figure.run == run:
                    scene = figure.draw(evidence)
                    titles[figure.name] = scene.title
                    render_scene(scene, files[figure.name])
    common = Path(os.path.commonpath([file.parent for file in files.values()]))
    table = Table(Column("figure"), Column("shows", wraps=True), Column("file"))
    for figure in figures:
        table.add(figure.name, titles[figure.name], str(files[figure.name].relative_to(common)))
    session.say(table, "", f"{common} has {count}.")
    rendered = [
        {"name": name, "shows": titles[name], "run": figure.run.name, "file": files[name]}
        for name, figure in zip(files, figures, strict=True)
    ]
    session.print_document({}, figures=rendered)
