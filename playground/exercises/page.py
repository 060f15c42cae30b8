"""The commands exercise, check, hint and solution."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import click

from playground.base.errors import UsageError
from playground.base.flags import flag, like
from playground.base.untrusted import printable
from playground.exercises import EXERCISES
from playground.exercises.attempt import BREAKPOINT, JUDGE
from playground.exercises.exercise import (
    BLOCKED,
    CATALOGUE,
    CHOOSE,
    CORE,
    FIND,
    PASS,
    PLACES,
    SUFFIX,
    Exercise,
    find_exercise,
)
from playground.exercises.file_checks import NOT_WRITTEN
from playground.exercises.gpus_of_check import start_with_gpus
from playground.exercises.verdict import Verdict, tell_lines
from playground.exercises.workbook import (
    Workbook,
    check_file,
    find_workbook,
    list_solutions,
    read_text,
)
from playground.lessons import LESSONS
from playground.ui import terminal
from playground.ui.commands import Command
from playground.ui.option_types import FILE
from playground.ui.options import flags
from playground.ui.run_options import RunOptions
from playground.ui.session import to_document
from playground.ui.tables import Column, Table
from playground.ui.text import heading
from playground.ui.units import plural
from playground.world.launcher import fork_client
from playground.world.launcher.pool import keeping_worlds

OURS = "python -m playground"
POLL = 0.3
"""Seconds between two looks at the files that are watched."""

LOCAL_LINK = re.compile(r"\[([^]]+)\]\(\.\.[^)]*\)")
"""A link to a file beside, of which a terminal shows the text alone."""
EMPTY_LINES = re.compile(r"\n([ \t]*\n){2,}")
NOT_BEGUN = "core"
MARKS = {"begun": "…", "changed": "~", "passed": "✓", NOT_BEGUN: "•"}
"""The states of an exercise, in the list, and those of the core that are not begun."""
LEGEND = {"changed": "changed since it passed"}
"""What is said of states that take more than their name."""


class Name(click.Choice[str]):
    """The name of an exercise, or of something else that has one."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if value in self.choices else find_exercise(value, self.choices).name


@dataclass(frozen=True, kw_only=True)
class ExerciseOptions(RunOptions):
    """The options of `exercise`, `check` and `solution`."""

    reset: bool = flag(False, "Begin again; a file that is there gets another name.")
    watch: bool = flag(False, "Check again whenever a file is saved, until Ctrl-C.")
    size: int | None = like(RunOptions, "size", help="Check on this number of ranks only.")
    seed: int = like(RunOptions, "seed", 0, help="Seed of random inputs.")
    debug: bool = flag(
        False,
        "Answer breakpoint() and pdb.set_trace() in solutions here, one rank after the other. No "
        "time limit ends them, and what passes is not noted.",
    )
    give_up: bool = flag(False, "Show it although yours has not passed.")


@click.command("exercise", cls=Command, short_help=EXERCISES["exercise"].purpose)
@click.argument("name", metavar="[NAME]", type=Name((*CATALOGUE, *PLACES)), required=False)
@flags(ExerciseOptions, "reset", "wide")
def exercise(name: str | None, reset: bool, wide: bool) -> None:
    """List the exercises, those of a lesson where NAME is one, and how far you are; with the NAME
    of an exercise, write the file to be completed into this folder and show the task."""
    work = Workbook(Path.cwd())
    if name is None or name in PLACES:
        if reset:
            raise UsageError("--reset begins one exercise again: name it")
        show_list(work, name, wide)
        return
    chosen = CATALOGUE[name]
    is_there = (work.folder / chosen.file).exists()
    told = work.begin(chosen, reset)
    show_markdown(chosen.task)
    steps = {"Check": f"check {chosen.file}", **hint_step(chosen, work)}
    if is_there and not reset:
        steps["Begin again"] = f"exercise {name} --reset"
    steps["Chapter"] = f"read {chosen.lesson}"
    terminal.say("", chosen.effort, told, *tell_steps(steps))


def show_list(work: Workbook, lesson: str | None, wide: bool) -> None:
    """All exercises or a lesson's, each with a mark, and the next one."""
    headings = "exercise", "", Column("min", right=True), "kind", Column("task", wraps=True)
    table, seen = Table(*headings), set[str]()
    chosen = [each for each in CATALOGUE.values() if lesson in (None, each.lesson)]
    for name, group in groupby(chosen, lambda each: each.lesson):
        its = [*group]
        table.add(heading(f"{name}  {work.count_passed(its)}"), *[""] * 4)
        for each in its:
            state = work.state(each).partition(",")[0] or NOT_BEGUN * (each.name in CORE)
            seen.add(state)
            task = each.title.partition(": ")[2]
            shown = f"{MARKS.get(state, ' ')} {each.name}"
            table.add(shown, each.grade, each.minutes, each.kind, task)
    last = next((each for each in reversed(chosen) if each.name in work.passed), chosen[0])
    legend = "  ".join(
        f"{mark} {LEGEND.get(state, state)}" for state, mark in MARKS.items() if state in seen
    )
    terminal.say(table, wide=wide)
    terminal.say(
        *filter(None, [legend and f"  {legend}"]), "", *tell_progress(work, last, work.name)
    )


def tell_progress(work: Workbook, first: Exercise, folder: str) -> list[str]:
    """How many exercises have passed, and the next one, from `first` on."""
    following = work.find_next(first)
    steps = {"Next": f"exercise {following.name}"} if following else {}
    return [f"{work.count_passed(CATALOGUE.values())} passed in {folder}", *tell_steps(steps)]


def tell_steps(steps: Mapping[str, str], way_in: str = "") -> list[str]:
    """Commands that can be pasted, behind what each is for; `way_in` before an exercise."""
    width = max(map(len, steps), default=0) + 1
    return [
        f"{f'{label}:':<{width}} {way_in * (label == 'Exercise')}{OURS} {words}"
        for label, words in steps.items()
    ]


def show_next() -> None:
    """Where the learner is on the path, and what comes next: lines that can be pasted."""
    work, here, every = find_workbook(), Workbook(Path.cwd()), [*CATALOGUE.values()]
    passed = [each for each in every if each.name in work.passed]
    is_apart = not work.is_near(here.folder)
    elsewhere = f", in {work.name}" * (work.folder != here.folder and not is_apart)
    where, steps = f"All {len(every)} exercises have passed{elsewhere}.", {}
    if following := work.find_next(work.find_last_passed()):
        lesson = following.lesson
        number = PLACES.index(lesson) + 1
        place = f"Lesson {number} of {len(LESSONS)}" if lesson in LESSONS else "Page"
        done, own = (sum(each.lesson == lesson for each in group) for group in (passed, every))
        where = (
            f"{place}, {lesson}: {done} of its {own} exercises "
            f"{'has' if done == 1 else 'have'} passed, {len(passed)} of all {len(every)}"
            f"{elsewhere}."
        )
        steps = {
            f"{OURS} read {lesson}": "its chapter",
            f"{work.way_in}{OURS} exercise {following.name}": "go on there"
            if is_apart
            else "the next exercise",
        }
    if is_apart:
        where = f"No exercise has been begun in this folder. In {work.name}: {where}"
        steps |= {f"{here.way_in}{OURS} exercise {every[0].name}": "begin here"}
    steps |= {f"{OURS} play": "to try things out", f"{OURS} --help": "all there is"}
    terminal.say(where)
    for command, what in steps.items():
        click.echo(f"{command:42}  # {what}")  # not wrapped, to be pasted


def show_steps_after(lesson: str) -> None:
    """What to type after a lesson's run: its chapter, and the first of its exercises that has not
    passed, or the next lesson."""
    work, after = find_workbook(), [*LESSONS, ""][[*LESSONS].index(lesson) + 1]
    own = [each.name for each in CATALOGUE.values() if each.lesson == lesson]
    steps = {"Chapter": f"read {lesson}"}
    if following := next((name for name in own if name not in work.passed), ""):
        steps["Exercise"] = f"exercise {following}"
    elif after:
        steps["Next"] = after
    click.echo("\n" + "\n".join(tell_steps(steps, work.way_in)))


def hint_step(chosen: Exercise, work: Workbook) -> dict[str, str]:
    """The next hint; after the last, the solution."""
    if number := work.next_hint(chosen):
        return {f"Hint {number} of {len(chosen.hints)}": f"hint {chosen.name}"}
    return {"Solution": f"solution {chosen.name}{' --give-up' * (chosen.name not in work.passed)}"}


def show_markdown(text: str) -> None:
    from playground.ui.rendering import render_markdown

    rendered = render_markdown(LOCAL_LINK.sub(r"\1", text), terminal.width())
    click.echo(EMPTY_LINES.sub("\n\n", rendered), nl=False)


@click.command("check", cls=Command, short_help=EXERCISES["check"].purpose)
@click.argument("files", metavar="[FILE]...", type=FILE, nargs=-1)
@flags(ExerciseOptions, "watch", "as_json", "size", "seed", "debug")
def check(
    files: tuple[Path, ...],
    watch: bool,
    as_json: bool,
    size: int | None,
    seed: int,
    debug: bool,
) -> None:
    """Run solutions, by default all of this folder, on real ranks, and say what is wrong with them.
    FILE may be the name of an exercise; several files of one exercise get a line each. Solutions
    are run as programs of yours: this is no sandbox.

    Exit codes: 0, all passed; 1, one did not; 2, there is no verdict on one.
    """
    if watch and as_json:
        raise UsageError("--watch has no end and --json prints one document: leave one of them out")
    if debug and (watch or as_json):
        raise UsageError("--debug asks at a terminal: leave --watch and --json out")
    files = tuple(map(find_file, files)) or tuple(list_solutions(Path()))
    if not files:
        raise UsageError(
            "there is no solution in this folder; list them: python -m playground exercise"
        )
    exercises = [each for file in files if (each := exercise_of(file))]
    start_with_gpus(exercises)
    fork_client.preload(JUDGE.module)
    for each in exercises:
        fork_client.preload(*each.preload)
        if size and size not in each.worlds:
            raise UsageError(f"-n {size}: {each.name} {tell_worlds(each)}")
    fork_client.warm_up()
    seen = read_all(files)  # before they are checked: what is saved meanwhile is checked again
    verdicts = check_all(files, size, seed, say=not as_json, debug=debug)
    if as_json:
        click.echo(to_document({"verdicts": verdicts}))
    while watch:
        now = read_all(files)  # before they are checked, too
        check_all([file for file in files if now[file] != seen[file]], size, seed, say=True)
        seen = now
        time.sleep(POLL)
    raise click.exceptions.Exit(max(verdict.exit_code for verdict in verdicts))


def tell_worlds(chosen: Exercise) -> str:
    """On how many ranks an exercise is checked, which are to be given in the place of others."""
    if chosen.kind == CHOOSE:
        return "runs nothing on ranks: leave -n out"
    if len(chosen.worlds) == 1:
        return f"is checked on {plural(chosen.worlds[0], 'rank')}: leave -n out"
    sizes = ", ".join(map(str, sorted(chosen.worlds)))
    return f"is checked on {sizes} ranks, choose one of them"


def exercise_of(file: Path) -> Exercise | None:
    """The exercise that a file is named after."""
    with contextlib.suppress(UsageError):
        return find_exercise(file.name)
    return None


def find_file(file: Path) -> Path:
    """The file, or that of the exercise which is called so."""
    if file.exists() or not (chosen := exercise_of(file)):
        return file
    kept = SUFFIX.search(file.name)
    return file.with_name(f"{chosen.function}{(kept and kept[1]) or ''}.py")


@keeping_worlds()  # in which mistakes of the catalogue run, to be compared with a failure
def check_all(
    files: Iterable[Path], size: int | None, seed: int, say: bool, debug: bool = False
) -> list[Verdict]:
    files, verdicts = list(files), []
    is_class = len({file.name for file in files}) < len(files)
    with terminal.Bar(shown=say and not debug) as bar:
        for place, file in enumerate(files):
            bar.show(f"checking {file.name}", place, len(files) if len(files) > 1 else None)
            verdict = check_file(file, size, seed, debug)
            verdicts.append(verdict)
            lines = tell_lines(verdict)
            if is_class:
                lines = [f"{lines[0]}{': ' if verdict.mistake else ''}{verdict.mistake}"]
            else:
                lines += tell_steps(steps_after(verdict, size, seed))
            if say:
                terminal.say(*map(printable, lines))
    folders = {file.resolve().parent for file in files}
    passed = [verdict for verdict in verdicts if verdict.status == PASS]
    is_whole = any(each.passed == find_exercise(each.exercise).worlds for each in passed)
    if say and is_whole and not is_class and len(folders) == 1:
        work = Workbook(folders.pop())
        terminal.say(*tell_progress(work, find_exercise(passed[-1].exercise), "this folder"))
    return verdicts


def steps_after(verdict: Verdict, size: int | None, seed: int) -> dict[str, str]:
    """What a learner may do next about this solution, as commands."""
    file, with_seed = shlex.quote(verdict.file), f" --seed {seed}" if seed else ""
    if verdict.words == NOT_WRITTEN:
        return {"Task": f"exercise {verdict.exercise}"}
    if verdict.status == BLOCKED:
        return {}
    chosen = find_exercise(verdict.exercise)
    has_sizes = len(chosen.worlds) > 1
    if verdict.status == PASS:
        chapter = {"Chapter": f"read {chosen.lesson}"} if chosen.kind == FIND else {}
        return {"On all sizes": f"check {file}"} if size and has_sizes else chapter
    on_size = f" -n {verdict.world}" if verdict.world and has_sizes else ""
    if verdict.words == BREAKPOINT:
        return {"Debug": f"check {file}{on_size}{with_seed} --debug"}
    hint = hint_step(chosen, Workbook(Path.cwd()))
    return {**hint, "Again": f"check {file}{on_size}{with_seed}"}


def read_all(files: Iterable[Path]) -> dict[Path, bytes]:
    """The contents of the files; nothing of one that is being replaced."""
    return {file: file.read_bytes() if file.is_file() else b"" for file in files}


@click.command("hint", cls=Command, short_help=EXERCISES["hint"].purpose)
@click.argument("name", metavar="NAME", type=Name(CATALOGUE))
@click.argument("number", metavar="[1|2|3]", type=click.IntRange(1, 3), required=False)
def hint(name: str, number: int | None) -> None:
    """Show the next hint for an exercise, or this one: 1, the idea; 2, the place; 3, nearly the
    code."""
    chosen, work = CATALOGUE[name], Workbook(Path.cwd())
    number = number or work.next_hint(chosen) or len(chosen.hints)
    show_markdown(f"Hint {chosen.describe_hint(number)}: {chosen.hints[number - 1]}")
    work.note_hint(chosen, number)
    terminal.say("", *tell_steps(hint_step(chosen, work)))


@click.command("solution", cls=Command, short_help=EXERCISES["solution"].purpose)
@click.argument("name", metavar="NAME", type=Name(CATALOGUE))
@flags(ExerciseOptions, "give_up")
def solution(name: str, give_up: bool) -> None:
    """Show the reference solution of an exercise, after yours has passed."""
    chosen = CATALOGUE[name]
    if not give_up and name not in Workbook(Path.cwd()).passed:
        see = f"see it all the same: python -m playground solution {name} --give-up"
        raise UsageError(f"{name} has not passed in this folder; {see}")
    file = Path(chosen.file)
    click.echo(chosen.solution_for(read_text(file) if file.is_file() else ""), nl=False)
