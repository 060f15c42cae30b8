"""The command `break`: it runs a program that goes wrong, and then its fix. Does not import
torch."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import click

from playground.base.errors import PlaygroundError, RankFailed, UsageError
from playground.base.files import temporary_folder
from playground.base.remote import ROOT, Remote, file_of
from playground.explain.right.checked import Checked
from playground.explain.right.report import tell
from playground.explain.right.run import find_mistakes_of
from playground.tools import TOOLS
from playground.tools.failures.programs import (
    ERRORS,
    FAILURE,
    PROGRAMS,
    SILENT,
    TIMEOUT,
    find,
    read_body,
)
from playground.ui.option_types import ALL, OneOf
from playground.ui.session import Ending, Session, run_to_its_end, session_command
from playground.ui.tables import RANK_COLUMN, Column, Table, Texts
from playground.ui.text import bad, good, heading, prose
from playground.world.command_world import CommandWorld, run_as_it_is
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT

TOOL = TOOLS["break"]
SIZE = 3
"""The fewest ranks among which one can be told to be the odd one out, and the default."""
STALL = 1.5
"""Seconds of silence after which a rank that is slow or stopped is named."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a program and its cure."""

    name: str
    symptom: str
    error: str
    """Class of the exception of `launch`; empty for none."""
    told: str
    """Its message."""
    diagnosis: str
    """Kind of the diagnosis, or the rule."""
    culprits: Sequence[int]
    """Ranks that it names."""
    line: str
    """Its line: "calls.py:12 in other_order"."""
    results: Sequence[object] | None
    """The return value of each rank; None if `launch` raised."""
    cured: Sequence[object]
    """The return value of each rank of the cure."""
    problem: str = ""
    """What is not as expected; empty if the program went wrong as it must, and its cure is
    right."""


def run(world: CommandWorld, name: str) -> Outcome:
    """Run a program, recorded if that is wanted, and then its cure, in a folder of their own."""
    expected = PROGRAMS[name]
    is_checked = expected.is_silent_training
    with temporary_folder(TOOL.name) as folder, contextlib.chdir(folder):
        timeout = STALL if expected.symptom == TIMEOUT else DEFAULT_TIMEOUT
        program = find(name)
        ending = run_to_its_end(world, Checked(program, folder) if is_checked else program,
                                timeout=timeout)  # fmt: skip
        mistakes = find_mistakes_of(folder, world.size) if is_checked else []
        world.around = run_as_it_is
        cured = world.run(find(name, "_cured"), timeout=DEFAULT_TIMEOUT, restarts=expected.restarts)
    outcome = outcome_of(name, ending, cured)
    if mistakes:
        found = mistakes[0]
        outcome = replace(
            outcome, told=tell(found), diagnosis=found.rule, culprits=found.ranks, line=found.where
        )
    return replace(outcome, problem=find_problem(outcome))


def outcome_of(name: str, ending: Ending, cured: Sequence[object]) -> Outcome:
    """What the end of a program, and the results of its cure, say without its training's
    mistakes."""
    error, told = ending.error, ending.diagnosis
    words, culprits = str(told or error or ""), told.culprits if told else ()
    if isinstance(error, RankFailed):
        words, culprits = f"{error.headline}{ellipsis_of(error)}", (error.rank,)
    symptom = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), SILENT)
    return Outcome(
        name=name,
        symptom=symptom,
        error=type(error).__name__ if error else "",
        told=words,
        diagnosis=told.kind if told else "",
        culprits=culprits,
        line=told.line if told else "",
        results=ending.results,
        cured=cured,
    )


def ellipsis_of(error: RankFailed) -> str:
    """An ellipsis if the message goes on behind its first line."""
    *_, rest = error.traceback.rpartition(error.headline[-40:])
    return " …" if rest != error.traceback and rest.strip() else ""


class Check(NamedTuple):
    """Something that an outcome must be."""

    expected: str
    holds: bool
    found: object


def find_problem(found: Outcome) -> str:
    """The first thing that is not as expected, in words; empty if everything is."""
    expected, size = PROGRAMS[found.name], len(found.cured)
    culprits = [*expected.culprits(size)]
    right = [*expected.right(size)]
    named = [*found.culprits]
    if expected.symptom == FAILURE:
        kind = f"the words {expected.words}"
        is_of_kind = expected.words in found.told
        told = found.told
        ranks, are_named = f"one of the ranks {culprits}", {*named} <= {*culprits}
    else:
        kind, told = f"the diagnosis {expected.words or 'none'}", found.diagnosis
        is_of_kind = told == expected.words
        ranks, are_named = f"the ranks {culprits}", named == culprits or not expected.words
    checks = [
        Check(expected.symptom, found.symptom == expected.symptom, found.told or found.results),
        Check(f"the fix to return {right}", found.cured == right, found.cured),
        Check("wrong values", found.results != right, found.results),
        Check(kind, is_of_kind, told),
        Check(ranks, are_named, named),
    ]
    failed = (each for each in checks if not each.holds)
    problem = next((f"{each.expected}, found {each.found or 'none'}" for each in failed), "")
    return problem and f"{found.name}: expected {problem}"


@session_command(
    TOOL.name,
    click.argument(
        "name",
        type=OneOf([*PROGRAMS, ALL], listed_by=f"python -m playground {TOOL.name}"),
        metavar="[NAME]",
        required=False,
    ),
    only=("size", "wide", "as_json", "see"),
    size=SIZE,
    min_size=SIZE,
    short_help=TOOL.purpose,
)
def command(session: Session, name: str | None) -> None:
    """Run a program that goes wrong, see what is said about it, and run it with the mistake fixed.

    Without NAME, list the programs; `all` runs one after the other. Exit code 0 if the program went
    wrong as it must, and the fixed program returned the right values.

    With --see, the program that goes wrong is recorded up to where it stands still.

    \b
        python -m playground break
        python -m playground break wrong-tag
        python -m playground break other-order -n 4
    """
    if session.run.see and name in (None, ALL):
        raise UsageError("--see records one program: name it")
    if session.world.rank_env:
        raise UsageError(
            f"{TOOL.name} starts worlds of its own: run it without torchrun, RANK and WORLD_SIZE"
        )
    if name is None:
        rows = [(each, expected.symptom, find(each).summary) for each, expected in PROGRAMS.items()]
        table = Table("name", "symptom", Column("what goes wrong", wraps=True), rows=rows)
        session.say(table, "", f"Run one with: python -m playground {TOOL.name} NAME")
        session.print_document({}, programs=rows)
        return
    names, outcomes = [*PROGRAMS] if name == ALL else [name], []
    session.world.warm_up(*map(find, names))
    session.say(f"{TOOL.name}: {session.world}")
    for each in names:
        session.say("", *program_texts(find(each)), "")
        outcomes.append(run(session.world, each))
        session.say(*outcome_texts(outcomes[-1]))
    session.print_document({}, programs=outcomes)
    if problem := next((each.problem for each in outcomes if each.problem), ""):
        raise PlaygroundError(problem)
    verdict = good(f"{name} went wrong as it must; fixed, it returns the right values")
    session.say("", prose(verdict, "."))


def program_texts(function: Remote) -> Texts:
    """The summary of the program, and its code."""
    about = prose(heading(function.name.replace("_", "-")), f": {function.summary}")
    code = (f"{number:>4}  {line}" for number, line in read_body(function).items())
    return [about, f"  {file_of(function.module).relative_to(ROOT)}", *code]


def outcome_texts(outcome: Outcome) -> Texts:
    """The diagnosis of the program, the difference to its cure, and the values."""
    changes = {"-": bad, "+": good}
    wrong, cured = ([*read_body(find(outcome.name, suffix)).values()] for suffix in ("", "_cured"))
    lines = [*difflib.unified_diff(wrong, cured, lineterm="", n=1)][2:]
    cure = [prose(changes.get(line[0], str)(line)) for line in lines if line[0] != "@"]
    values = {"wrong": outcome.results, "fixed": outcome.cured}
    shown = {name: by_rank for name, by_rank in values.items() if by_rank is not None}
    rows = ((rank, *row) for rank, row in enumerate(zip(*shown.values(), strict=True)))
    table = Table(RANK_COLUMN, *(Column(name, wraps=True) for name in shown), rows=rows)
    name = outcome.error or "A warning"
    first, _, rest = outcome.told.partition(":")
    if PROGRAMS[outcome.name].is_silent_training:
        name = "No error is raised. With --check hints"
    said: Texts = ["No error is raised."]
    if first == name.lower():  # what is said begins with it
        said = [prose(bad(f"{first}:"), rest)]
    elif outcome.told:
        said = [prose(bad(f"{name}:")), outcome.told]
    return [*said, "", "The fix:", *cure, "", table]
