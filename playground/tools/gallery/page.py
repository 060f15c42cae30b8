"""The command `break`: programs that go wrong, what is expected of each, and its cure. Does not import torch."""

from __future__ import annotations

import ast
import contextlib
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import click

from playground.console.options import ALL, RunOptions, flags
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Table, Texts
from playground.console.text import bad, good, heading, prose
from playground.runtime.errors import PlaygroundError, RankFailed, RankTimeout, UsageError
from playground.runtime.launcher.entry import World
from playground.runtime.meeting.rendezvous import DEFAULT_TIMEOUT
from playground.runtime.remote import ROOT, Remote, file_of, remote
from playground.runtime.temporary_folder import temporary_folder
from playground.tools import TOOLS

TOOL = TOOLS["break"]
SIZE = 3
"""The fewest ranks among which one can be told to be the odd one out, and the default."""
STALL = 2.0
"""Seconds of silence after which a rank that is slow or stopped is named."""
HANG, FAILURE, SILENT = "hang", "failure", "wrong values"
ERRORS = {HANG: RankTimeout, FAILURE: RankFailed}
"""What `launch` raises."""
Ranks = Callable[[int], Sequence[int]]
Values = Callable[[int], Sequence[object]]
"""A value for each rank of a world of this size."""


def only(rank: int) -> Ranks:
    return lambda size: [rank]


def all_from(first: int) -> Ranks:
    return lambda size: [*range(first, size)]


def on_all(value: Callable[[int], object]) -> Values:
    """The same value on each rank."""
    return lambda size: [value(size)] * size


TOTAL = on_all(lambda size: size * (size + 1) / 2)
"""The sum of rank + 1 over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """How a program goes wrong, and what its cure returns."""

    right: Values
    """What each rank of the cure returns."""
    symptom: str = SILENT
    words: str = ""
    """The diagnosis of a hang; words of a failure."""
    culprits: Ranks = range
    """Whose fault a hang is; of a failure, the ranks that may be the first to fail."""
    at: str = ""
    """Beginning of the line of code that the diagnosis names."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds."""
    restarts: int = 0
    """How often the cure is restarted."""


def hang(words: str, culprits: Ranks, right: Values, at: str = "", timeout: float = STALL) -> Expected:
    return Expected(symptom=HANG, words=words, culprits=culprits, right=right, at=at, timeout=timeout)


def failure(words: str, culprits: Ranks, right: Values, restarts: int = 0) -> Expected:
    return Expected(symptom=FAILURE, words=words, culprits=culprits, right=right, restarts=restarts)


ORDER, FINISHED = "different collectives", "a rank that has finished"
BOARDS = {
    "calls": {
        "other-order": hang(ORDER, only(1), TOTAL, "dist.broadcast(weight"),
        "absent-rank": hang(FINISHED, all_from(1), TOTAL),
        "rank-branch": hang(ORDER, only(0), TOTAL, "dist.barrier()"),
        "unequal-batches": hang(FINISHED, all_from(1), on_all(lambda size: sum(range(2 * size)))),
        "other-shape": hang("different shapes", only(1), on_all(lambda size: 4 * size - 1), "dist.all_reduce(losses)"),
        "other-dtype": Expected(right=on_all(lambda size: 7 * size)),
        "wrong-root": hang("different roots", range, on_all(lambda size: 1), "dist.broadcast("),
        "partial-group": hang("a group not made by all", all_from(2), TOTAL, "everyone = "),
        "send-send": hang("send against send", range, lambda size: [size, *range(1, size)], "dist.send("),
        "wrong-tag": hang("wrong tag", lambda size: [0, 1], lambda size: [1, 1, *range(3, size + 1)], "dist."),
        "message-size": failure("SIGABRT", only(1), lambda size: [4, 4, *range(12, 4 * size + 1, 4)]),
    },
    "training": {
        "unused-parameters": failure("not used in producing loss", range, on_all(lambda size: (size + 1) / 2)),
        "forgotten-set-epoch": Expected(right=on_all(lambda size: 3)),
        "same-seed": Expected(right=on_all(lambda size: size)),
        "all-download": Expected(right=on_all(lambda size: 4000)),
        "nan": Expected(right=on_all(lambda size: (size * (size + 1) / 2 - 2) / (size - 1))),
        "set-order": Expected(right=on_all(lambda size: [size * length for length in range(4, 10)])),
    },
    "processes": {
        "killed": failure("SIGKILL", only(1), on_all(lambda size: 2 * size * (size + 1)), restarts=1),
        "stopped": hang("stopped", only(1), TOTAL),
        "straggler": hang("straggler", only(1), on_all(lambda size: 20 * size), "time.sleep("),
        "collective-in-finally": hang(ORDER, only(1), on_all(lambda size: size - 1), "dist.barrier()"),
        "port-taken": failure("EADDRINUSE", range, on_all(lambda size: True)),
    },
}
"""What is expected of the programs of each board, by the name that the command takes."""


PROGRAMS = {name: expected for rows in BOARDS.values() for name, expected in rows.items()}


def find(name: str, suffix: str = "") -> Remote:
    """The function of a program; with the suffix "_cured", of its cure."""
    board = next(board for board, rows in BOARDS.items() if name in rows)
    return remote(f"playground.tools.gallery.{board}:{name.replace('-', '_')}{suffix}")


def read_body(function: Remote) -> dict[int, str]:
    """Its lines of code, by number: without its head and its docstring."""
    text = file_of(function.module).read_text(encoding="utf-8")
    node = next(each for each in ast.parse(text).body if getattr(each, "name", "") == function.name)
    assert isinstance(node, ast.FunctionDef)
    first = node.body[ast.get_docstring(node) is not None].lineno
    return dict(enumerate(text.splitlines()[first - 1 : node.end_lineno], first))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a program and its cure came to."""

    name: str
    symptom: str
    error: str
    """The class of what `launch` raised, and its words; empty if it returned."""
    results: Sequence[object] | None
    """What each rank returned; None if `launch` raised."""
    diagnosis: str
    """Why it hangs, in a few words; empty if it does not."""
    culprits: Sequence[int]
    line: str
    """The ranks that are named, and the line: "calls.py:12 in other_order"."""
    cured: Sequence[object]
    """What each rank of the cure returned."""
    problem: str = ""
    """What is not as expected; empty if the program went wrong as it must, and its cure is right."""


def run(world: World, name: str) -> Outcome:
    """Run a program, and then its cure, in a folder of their own."""
    expected, error, results = PROGRAMS[name], None, None
    with temporary_folder(TOOL.name) as folder, contextlib.chdir(folder):
        try:
            world.timeout = expected.timeout
            results = world.run(find(name))
        except (RankFailed, RankTimeout) as failed:
            error = failed
        world.timeout, world.restarts = DEFAULT_TIMEOUT, expected.restarts
        cured = world.run(find(name, "_cured"))
        world.restarts = 0
    diagnosis = getattr(error, "diagnosis", None)
    outcome = Outcome(
        name=name,
        symptom=next((symptom for symptom, kind in ERRORS.items() if isinstance(error, kind)), SILENT),
        error=f"{type(error).__name__}: {diagnosis or error.headline}" if error else "",
        results=results,
        diagnosis=diagnosis.kind if diagnosis else "",
        culprits=diagnosis.culprits if diagnosis else [error.rank] if isinstance(error, RankFailed) else [],
        line=diagnosis.line if diagnosis else "",
        cured=cured,
    )
    return replace(outcome, problem=find_problem(outcome))


def find_problem(found: Outcome) -> str:
    """What is not as expected, in words; empty if everything is."""
    expected, size = PROGRAMS[found.name], len(found.cured)
    culprits, right = [*expected.culprits(size)], [*expected.right(size)]
    checks: list[tuple[str, bool, object]] = [
        (expected.symptom, found.symptom == expected.symptom, found.error or found.results),
        (f"the cure to return {right}", found.cured == right, found.cured),
    ]
    if expected.symptom == SILENT:
        checks.append(("wrong values", found.results != right, found.results))
    if expected.symptom == FAILURE:
        checks.append((f"the words {expected.words}", expected.words in found.error, found.error))
        checks.append((f"one of the ranks {culprits}", {*found.culprits} <= {*culprits}, found.culprits))
    if expected.symptom == HANG and found.diagnosis:
        number = re.search(r":(\d+)", found.line)
        code = read_body(find(found.name)).get(int(number[1]), "") if number else ""
        checks.append((f"the diagnosis {expected.words}", found.diagnosis == expected.words, found.diagnosis))
        checks.append((f"the ranks {culprits}", [*found.culprits] == culprits, found.culprits))
        checks.append((f"the line {expected.at}", code.strip().startswith(expected.at), found.line))
    problem = next((f"{what}, found {instead or 'none'}" for what, holds, instead in checks if not holds), "")
    return problem and f"{found.name}: expected {problem}"


@click.command(TOOL.name, short_help=TOOL.purpose)
@click.argument("name", type=click.Choice([*PROGRAMS, ALL]), metavar="[NAME]", required=False)
@flags(RunOptions, "size", "wide", "as_json", changes={"size": {"show_default": str(SIZE)}})
def command(name: str | None, size: int | None, wide: bool, as_json: bool) -> None:
    """Run a program that goes wrong, see what is said about it, and run its cure.

    Without NAME, list the programs; `all` runs one after the other. Exit code 0 if the program went wrong as it must,
    and its cure returned the right values.

    \b
        python -m playground break
        python -m playground break wrong-tag
        python -m playground break other-order -n 4
    """
    session = Session(TOOL.name, RunOptions(size=size, wide=wide, as_json=as_json), default_size=SIZE, min_size=SIZE)
    if session.world.rank_env:
        raise UsageError(f"{TOOL.name} starts worlds of its own: run it without torchrun, RANK and WORLD_SIZE")
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
        session.say("", *board_texts(find(each)), "")
        outcomes.append(run(session.world, each))
        session.say(*outcome_texts(outcomes[-1]))
    session.print_document({}, programs=outcomes)
    if problem := next((each.problem for each in outcomes if each.problem), ""):
        raise PlaygroundError(problem)
    session.say("", prose("Shown: ", good(f"{name} went wrong as it must; cured, it returns the right values"), "."))


def board_texts(function: Remote) -> Texts:
    """What the program shows, and its code."""
    about = prose(heading(function.name.replace("_", "-")), f": {function.summary}")
    code = (f"{number:>4}  {line}" for number, line in read_body(function).items())
    return [about, f"  {file_of(function.module).relative_to(ROOT)}", *code]


def outcome_texts(outcome: Outcome) -> Texts:
    """What is said about the program, the difference to its cure, and the values."""
    changes = {"-": bad, "+": good}
    wrong, cured = ([*read_body(find(outcome.name, suffix)).values()] for suffix in ("", "_cured"))
    lines = [*difflib.unified_diff(wrong, cured, lineterm="", n=1)][2:]
    cure = [prose(changes.get(line[0], str)(line)) for line in lines if line[0] != "@"]
    table = Table(RANK_COLUMN, *(Column(text, wraps=True) for text in ["wrong"] * (not outcome.error) + ["cured"]))
    for rank, values in enumerate(zip(*filter(None, (outcome.results, outcome.cured)), strict=True)):
        table.add(rank, *values)
    return [prose(bad(outcome.error or "No error is raised.")), "", "The cure:", *cure, "", table]
