"""The commands exercise, check, hint and solution."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import click

from playground.console import terminal
from playground.console.options import FILE, RunOptions, flags
from playground.console.session import to_document
from playground.console.tables import Column, Table
from playground.exercises import EXERCISES
from playground.exercises.exercise import CATALOGUE, PASS
from playground.exercises.verdict import JUDGE, Verdict, tell_lines
from playground.exercises.work import Workbook, check_file, list_solutions, read_text
from playground.runtime.errors import UsageError
from playground.runtime.launcher import server
from playground.runtime.launcher.kept import keeping_worlds
from playground.runtime.untrusted import printable

POLL = 0.3
"""Seconds between two looks at the files that are watched."""

NAME = click.Choice(tuple(CATALOGUE))


@click.command("exercise", short_help=EXERCISES["exercise"].purpose)
@click.argument("name", metavar="[NAME]", type=NAME, required=False)
@click.option("--reset", is_flag=True, help="Begin again; a file that is there gets another name.")
def exercise(name: str | None, reset: bool) -> None:
    """List the exercises and how far you are; with NAME, write the file to be completed into this
    folder and show the task."""
    if name is None:
        if reset:
            raise UsageError("--reset begins one exercise again: name it")
        show_map(Workbook(Path.cwd()))
        return
    chosen = CATALOGUE[name]
    told = Workbook(Path.cwd()).begin(chosen, reset)
    show_markdown(chosen.task)
    terminal.say("", chosen.effort, told)


def show_map(work: Workbook) -> None:
    table = Table(
        "lesson", "exercise", "kind", Column("min", right=True), Column("", wraps=True), "state"
    )
    following, lesson = None, ""
    for each in CATALOGUE.values():
        state = work.state(each)
        following = following or (None if state == "passed" else each)
        shown, lesson = each.lesson * (each.lesson != lesson), each.lesson
        table.add(shown, each.name, each.kind, each.minutes, each.title.partition(": ")[2], state)
    end = (
        f"Next: python -m playground exercise {following.name}" if following else "All have passed."
    )
    terminal.say(table, "", end)


def show_markdown(text: str) -> None:
    from playground.console.rendering import render_markdown

    click.echo(render_markdown(text, terminal.width()), nl=False)


@click.command("check", short_help=EXERCISES["check"].purpose)
@click.argument("files", metavar="[FILE]...", type=FILE, nargs=-1)
@click.option("--watch", is_flag=True, help="Check again whenever a file is saved, until Ctrl-C.")
@flags(
    RunOptions,
    *("as_json", "size", "seed"),
    changes={
        "size": {"type": click.IntRange(1), "help": "Check on this number of ranks only."},
        "seed": {"default": 0, "help": "Seed of random inputs."},
    },
)
def check(files: tuple[Path, ...], watch: bool, as_json: bool, size: int | None, seed: int) -> None:
    """Run solutions, by default all of this folder, on real ranks, and say what is wrong with them.
    FILE may be the name of an exercise; several files of one exercise get a line each. Solutions
    are run as programs of yours: this is no sandbox.

    Exit codes: 0, all passed; 1, one did not; 2, there is no verdict on one.
    """
    if watch and as_json:
        raise UsageError("--watch has no end and --json prints one document: leave one of them out")
    files = tuple(map(find_file, files)) or tuple(list_solutions(Path()))
    if not files:
        raise UsageError(
            "there is no solution in this folder: python -m playground exercise lists what there "
            "is to do"
        )
    server.preload(JUDGE.module)
    for each in filter(None, (CATALOGUE.get(file.stem.replace("_", "-")) for file in files)):
        server.preload(*each.preload)
        if size and size not in each.worlds:
            sizes = ", ".join(map(str, sorted(each.worlds)))
            raise UsageError(
                f"-n {size}: {each.name} is checked on {sizes} ranks, choose one of them"
            )
    server.warm_up()
    seen, verdicts = read_all(files), check_all(files, size, seed, say=not as_json)
    if as_json:
        click.echo(to_document({"verdicts": verdicts}))
    while watch:
        now = read_all(files)  # before they are checked: what is saved meanwhile is checked again
        check_all([file for file in files if now[file] != seen[file]], size, seed, say=True)
        seen = now
        time.sleep(POLL)
    raise click.exceptions.Exit(max(verdict.exit_code for verdict in verdicts))


def find_file(file: Path) -> Path:
    """The file, or that of the exercise which is called so."""
    chosen = CATALOGUE.get(file.name.replace("_", "-"))
    return file if file.exists() or chosen is None else file.with_name(chosen.file)


@keeping_worlds()  # in which mistakes of the catalogue run, to be compared with a failure
def check_all(files: Iterable[Path], size: int | None, seed: int, say: bool) -> list[Verdict]:
    files, verdicts = list(files), []
    for file in files:
        verdict = check_file(file, size, seed)
        verdicts.append(verdict)
        lines = tell_lines(verdict)
        if sum(other.name == file.name for other in files) > 1:
            lines = [f"{lines[0]}{': ' * bool(verdict.mistake)}{verdict.mistake}"]
        elif verdict.world and verdict.status != PASS:
            again = f"check {file} -n {verdict.world}{f' --seed {seed}' if seed else ''}"
            lines.append(f"Next: hint {verdict.exercise}   Again: {again}")
        if say:
            terminal.say(*map(printable, lines))
    return verdicts


def read_all(files: Iterable[Path]) -> dict[Path, bytes]:
    """The contents of the files; nothing of one that is being replaced."""
    return {file: file.read_bytes() if file.is_file() else b"" for file in files}


@click.command("hint", short_help=EXERCISES["hint"].purpose)
@click.argument("name", metavar="NAME", type=NAME)
@click.argument("number", metavar="[1|2|3]", type=click.IntRange(1, 3), default=1)
def hint(name: str, number: int) -> None:
    """Show a hint for an exercise: 1, the idea; 2, the place; 3, nearly the code."""
    chosen = CATALOGUE[name]
    show_markdown(f"{chosen.describe_hint(number)}: {chosen.hints[number - 1]}")


@click.command("solution", short_help=EXERCISES["solution"].purpose)
@click.argument("name", metavar="NAME", type=NAME)
@click.option("--give-up", is_flag=True, help="Show it although yours has not passed.")
def solution(name: str, give_up: bool) -> None:
    """Show the reference solution of an exercise, after yours has passed."""
    chosen = CATALOGUE[name]
    if not give_up and name not in Workbook(Path.cwd()).passed:
        raise UsageError(
            f"{chosen.name} has not passed here: check {chosen.file} first, or add --give-up"
        )
    file = Path(chosen.file)
    click.echo(chosen.solution_for(read_text(file) if file.is_file() else ""), nl=False)
