"""The learner's folder of solutions, and what has passed there: `exercises.json` in the user's
folder for such state. Does not import torch.

Whatever that file has lost, `check` finds out again. Solutions are read once, and never
overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import itertools
import json
import os
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from playground.base.errors import UsageError
from playground.base.files import replacing, writing
from playground.base.untrusted import expect_dict, parse_json, printable
from playground.exercises.attempt import Solution
from playground.exercises.exercise import (
    BLOCKED,
    CATALOGUE,
    CORE,
    ERROR,
    FIND,
    PASS,
    Exercise,
    find_exercise,
)
from playground.exercises.file_checks import lacks_function
from playground.exercises.repair import seed_of
from playground.exercises.verdict import Verdict, check_solution, tell_lines


def progress_file(name: str = "exercises") -> Path:
    """Where progress is kept, for all folders of this user: the exercises that have passed, the
    hints that have been shown, or the seeds of programs to be repaired."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "playground" / f"{name}.json"


class Workbook:
    """The solutions in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder.resolve())
        self.passed = self.read("exercises")
        """By exercise, the digest of the solution that has passed."""
        self.hints = self.read("hints")
        """By exercise, the number of the hint that was shown last."""
        self.seeds = self.read("seeds")
        """By program to be repaired, the seed that it was handed out with."""

    @property
    def way_in(self) -> str:
        """What is to be typed before a command that is to run in its folder: for a first solution
        one of its own, unless this one is empty."""
        if self.folder != Path.cwd():
            return f"cd {shlex.quote(self.name)} && "
        is_new = not self.passed and not list_solutions(self.folder)
        return "mkdir -p my && cd my && " if is_new and any(self.folder.iterdir()) else ""

    def is_near(self, folder: Path) -> bool:
        """Whether its folder is this one, or lies in it, or around it."""
        own, other = self.folder.resolve(), folder.resolve()
        return own.is_relative_to(other) or other.is_relative_to(own)

    def read(self, name: str) -> dict[str, object]:
        """The part of a file that is about this folder."""
        return self.part_of(read_progress_file(name))

    def part_of(self, known: Mapping[str, object]) -> dict[str, object]:
        """The part of what a file has that is about this folder."""
        found = known.get(self.name)
        return found if isinstance(found, dict) else {}

    def note(self, exercise: Exercise, digest: str) -> None:
        """Note that this solution has passed."""
        self.passed[exercise.name] = digest
        self.write("exercises", exercise, digest)

    def note_hint(self, exercise: Exercise, number: int) -> None:
        """Note which hint was shown last."""
        self.hints[exercise.name] = number
        self.write("hints", exercise, number)

    def write(self, name: str, exercise: Exercise, value: object) -> None:
        """Write what a file says of an exercise in this folder. Other processes write there, too:
        what they have written stays. Where that cannot be, say so: a verdict or a hint is shown all
        the same."""
        file = progress_file(name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with writing(file.with_suffix(".lock"), append=True) as lock:
                with contextlib.suppress(OSError):  # this disk has no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                known = read_progress_file(name)
                known[self.name] = self.part_of(known) | {exercise.name: value}
                with (
                    replacing(file, f"{file.stem}.{os.getpid()}.new") as descriptor,
                    open(descriptor, "w", encoding="utf-8", closefd=False) as new,
                ):
                    new.write(f"{json.dumps(known, indent=1)}\n")
        except OSError as error:
            what_to_do = "set XDG_STATE_HOME to a folder"
            click.echo(
                f"playground: {file} cannot be written ({error.strerror}): {what_to_do}", err=True
            )

    def next_hint(self, exercise: Exercise) -> int:
        """The number of the first hint that has not been shown; 0 after the last."""
        shown = self.hints.get(exercise.name)
        number = shown + 1 if isinstance(shown, int) else 1
        return number if number <= len(exercise.hints) else 0

    def count_passed(self, exercises: Iterable[Exercise]) -> str:
        """How many of these have passed, as "3 of 5"."""
        names = [each.name for each in exercises]
        return f"{sum(name in self.passed for name in names)} of {len(names)}"

    def find_next(self, first: Exercise) -> Exercise | None:
        """The first exercise that has not passed: of the core, from the lesson of this one on, and
        then of the lessons before it; else of all, in the same order."""
        every = [*CATALOGUE.values()]
        place = [each.lesson for each in every].index(first.lesson)
        following = [each for each in every[place:] + every[:place] if each.name not in self.passed]
        core = [each for each in following if each.name in CORE]
        return next(iter(core + following), None)

    def find_last_passed(self) -> Exercise:
        """The last exercise of the path that has passed; the first one if none has."""
        every = [*CATALOGUE.values()]
        return next((each for each in reversed(every) if each.name in self.passed), every[0])

    def state(self, exercise: Exercise) -> str:
        """How far the learner is with it, in a few words."""
        has_file, was_right = (self.folder / exercise.file).is_file(), exercise.name in self.passed
        if not has_file:
            return "passed, file gone" if was_right else ""
        return ("passed" if self.has_passed(exercise) else "changed") if was_right else "begun"

    def has_passed(self, exercise: Exercise) -> bool:
        """Whether the file as it is now has passed the exercise as it is now."""
        known, file = self.passed.get(exercise.name), self.folder / exercise.file
        return (
            file.is_file() and exercise.digest(file.read_bytes().decode(errors="replace")) == known
        )

    def begin(self, exercise: Exercise, reset: bool) -> str:
        """Write the stub, unless there is a file; with `reset` that file gets another name. Says
        what was done."""
        file, words = self.folder / exercise.file, ""
        if file.exists() and not reset:
            return f"{file.name} is here already and stays as it is.{tell_other(exercise, file)}"
        if not self.passed and not list_solutions(self.folder):
            words = f"Progress is counted per folder; this one is {self.name}\n"
        try:
            if file.exists():
                names = (file.with_suffix(f".{number}.py") for number in itertools.count(1))
                kept = file.rename(next(each for each in names if not each.exists()))
                words = f"What was in it is in {kept.name} now. "
            text = exercise.new_stub()
            with file.open("x", encoding="utf-8") as stub:
                stub.write(text)
        except OSError as error:
            raise UsageError(
                f"{file} cannot be written ({error.strerror}): work in a folder of your own"
            ) from None
        if exercise.kind == FIND:
            self.seeds[exercise.name] = seed_of(text)
            self.write("seeds", exercise, seed_of(text))
            words += f"{file.name} fails, and its check says how: the report. "
        verb = "Repair" if exercise.kind == FIND else "Complete"
        return f"{words}{verb} {file.name} in this folder."

    def solutions_before(self, exercise: Exercise) -> list[Solution]:
        """The functions that the exercise builds on: the learner's own file if it has passed, else
        the reference."""
        solutions = []
        for name in exercise.builds_on:
            other = CATALOGUE[name]
            is_own, file = self.has_passed(other), self.folder / other.file
            text = read_text(file) if is_own else other.solution
            before = [each for each in self.solutions_before(other) if each not in solutions]
            solutions += [
                *before,
                Solution(other, text, str(file) if is_own else f"<{other.file}>"),
            ]
        return solutions

    def check(
        self, file: Path, text: str, world: int | None, seed: int, debug: bool = False
    ) -> Verdict:
        """Judge a solution, and note that it has passed, unless it is debugged."""
        exercise = find_exercise(file.name)
        solution = Solution(exercise, text, str(file))
        is_own = file.name == exercise.file
        seeds = self.seeds.get(exercise.name), seed_of(text)
        if is_own and None not in seeds and seeds[0] != seeds[1]:
            words = (
                f"SEED is no longer {seeds[0]}: this is another program; write {seeds[0]} again, "
                f"or begin again: python -m playground exercise {exercise.name} --reset"
            )
            return Verdict(exercise=exercise.name, file=str(file), status=ERROR, words=words)
        verdict = check_solution(solution, self.solutions_before(exercise), world, seed, debug)
        if verdict.status != PASS or verdict.passed != exercise.worlds or debug:
            return verdict
        if not is_own:
            words = f"not noted: the file of {exercise.name} is {exercise.file}"
            return replace(verdict, notes=(*verdict.notes, words))
        if self.passed.get(exercise.name) != exercise.digest(text):
            self.note(exercise, exercise.digest(text))
        return verdict


def find_workbook() -> Workbook:
    """That of the working folder, if there is a solution; else the one in which most have passed,
    if any has."""
    here = Workbook(Path.cwd())
    if here.passed or list_solutions(here.folder):
        return here
    others = [Workbook(Path(name)) for name in read_progress_file() if Path(name).is_dir()]
    best = max(others, key=lambda other: len(other.passed), default=here)
    return best if best.passed else here


def read_progress_file(name: str = "exercises") -> dict[str, object]:
    """The learner's progress, by folder; empty if there is no such file, or it is damaged."""
    try:
        return expect_dict(parse_json(progress_file(name).read_bytes()))
    except (OSError, ValueError):
        return {}


def tell_other(exercise: Exercise, file: Path) -> str:
    """What is said of a file of the exercise's name that is another program."""
    try:
        if not lacks_function(exercise, read_text(file)):
            return ""
    except (SyntaxError, ValueError, UsageError):  # which its check tells
        return ""
    return (
        f" It has no function {exercise.function}: if it is another program, --reset keeps it "
        "under another name."
    )


def read_text(file: Path) -> str:
    """Raises `UsageError` for what cannot be read."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file.name} is not UTF-8 text (byte {error.start}): save it as such"
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def check_file(file: Path, world: int | None, seed: int, debug: bool = False) -> Verdict:
    """Judge a file by the exercise that it is named after. What is no solution at all gets a
    verdict, too."""
    verdict = Verdict(exercise=file.stem, file=str(file), status=BLOCKED, seed=seed)
    try:
        exercise = find_exercise(file.name)
        if not file.exists():
            begin = f"; begin it: python -m playground exercise {exercise.name}"
            raise UsageError(f"there is no such file{begin * (file.name == exercise.file)}")
        return Workbook(file.parent).check(file, read_text(file), world, seed, debug)
    except UsageError as error:
        return replace(
            verdict, words=str(error), status=ERROR if "UTF-8" in str(error) else BLOCKED
        )


def check_function(function: Callable[..., object]) -> Verdict:
    """Judge a function by the exercise that it is named after, and print the verdict."""
    exercise = find_exercise(function.__name__)
    file = inspect.getsourcefile(function) or "<notebook>"
    first = inspect.getsourcelines(function)[1]
    if Path(file).name == exercise.file:
        text = read_text(Path(file))
    else:  # a notebook's: the reference's imports come before it, in one line, so that its lines
        # keep their numbers
        lines = exercise.solution.splitlines()
        imports = "; ".join(line for line in lines if line.startswith(("import ", "from ")))
        source = textwrap.dedent(inspect.getsource(function))
        text = f"{imports}{chr(10) * max(1, first - 1)}{source}"
    verdict = check_text(exercise, text, file)
    click.echo("\n".join(printable(line) for line in tell_lines(verdict)))
    return verdict


def check_text(exercise: Exercise, text: str, file: str) -> Verdict:
    """Judge a solution that lies in no file of this folder."""
    before = Workbook(Path.cwd()).solutions_before(exercise)
    return check_solution(Solution(exercise, text, file), before)


def list_solutions(folder: Path) -> list[Path]:
    """The files in a folder that are named after exercises, in the exercises' order."""
    return [folder / each.file for each in CATALOGUE.values() if (folder / each.file).is_file()]
