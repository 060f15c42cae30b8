"""The commands `break`, for programs that go wrong, what is expected of each and its cure, and
`why`. Does not import torch."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from playground.base.errors import Deadlock, PlaygroundError, RankFailed, RankTimeout, UsageError
from playground.base.files import temporary_folder
from playground.base.remote import ROOT, Remote, file_of, remote
from playground.explain.hang import UNASKED, Doing, Kind, RankState, diagnosis
from playground.explain.hang.box import View, find_boxes, process_status
from playground.explain.right.checked import Checked
from playground.explain.right.report import tell
from playground.explain.right.run import find_mistakes_of
from playground.tools import TOOLS
from playground.ui.options import ALL, OneOf
from playground.ui.session import Session, run_to_its_end, session_command, to_document
from playground.ui.tables import RANK_COLUMN, Column, Table, Texts
from playground.ui.text import bad, good, heading, prose
from playground.world.command_world import CommandWorld, run_as_it_is
from playground.world.rank.process import find_lifelines
from playground.world.rendezvous.rendezvous import DEFAULT_TIMEOUT

TOOL = TOOLS["break"]
SIZE = 3
"""The fewest ranks among which one can be told to be the odd one out, and the default."""
STALL = 1.5
"""Seconds of silence after which a rank that is slow or stopped is named."""
BETWEEN_LOOKS = 0.3
"""Seconds: a rank that makes no progress meanwhile stands still."""
COMPUTING = 3
"""Hundredths of a second of CPU time between two looks of a rank that computes: one that waits
takes none."""
DEADLOCK = "deadlock"
TIMEOUT = "timeout"
FAILURE = "failure"
SILENT = "wrong values"
ERRORS = {DEADLOCK: Deadlock, TIMEOUT: RankTimeout, FAILURE: RankFailed}
"""Exceptions that `launch` raises, by symptom: of several that fit, the first."""
Ranks = Callable[[int], Sequence[int]]
Values = Callable[[int], Sequence[object]]
"""A value for each rank of a world of this size."""


def only(rank: int) -> Ranks:
    return lambda size: [rank]


def all_but_first(size: int) -> Sequence[int]:
    return range(1, size)


def on_all(value: Callable[[int], object]) -> Values:
    """The same value on each rank."""
    return lambda size: [value(size)] * size


TOTAL = on_all(lambda size: size * (size + 1) / 2)
"""The sum of rank + 1 over all ranks."""


@dataclass(frozen=True)
class Expected:
    """How a program goes wrong, and what each rank of its cure returns."""

    symptom: str
    right: Values
    words: str = ""
    """The kind of the diagnosis; of a failure, words of it; of silent training, the rule that names
    the mistake."""
    culprits: Ranks = range
    """The ranks that are named; of a failure, those that may be the first to fail."""
    restarts: int = 0
    """How often the cure is restarted."""


EXPECTED_BY_MODULE = {
    "calls": {
        "other-order": Expected(DEADLOCK, TOTAL, Kind.COLLECTIVES, only(1)),
        "absent-rank": Expected(DEADLOCK, TOTAL, Kind.ENDED, all_but_first),
        "unequal-batches": Expected(DEADLOCK, on_all(lambda n: sum(range(2 * n))), Kind.ENDED,
                                    all_but_first),
        "other-shape": Expected(DEADLOCK, on_all(lambda n: 4 * n - 1), Kind.SHAPES, only(1)),
        "other-dtype": Expected(SILENT, on_all(lambda n: 7 * n), Kind.DTYPES, only(1)),
        "wrong-root": Expected(DEADLOCK, on_all(lambda n: 1), Kind.ROOTS, range),
        "partial-group": Expected(DEADLOCK, TOTAL, Kind.PARTIAL_GROUP, lambda n: [n - 1]),
        "send-send": Expected(DEADLOCK, lambda n: [n, *range(1, n)], Kind.SENDS, range),
        "wrong-tag": Expected(DEADLOCK, lambda n: [1, 1, *range(3, n + 1)], Kind.WRONG_TAG,
                              lambda n: [0, 1]),
        "message-size": Expected(FAILURE, lambda n: [4, 4, *range(12, 4 * n + 1, 4)], "SIGABRT",
                                 only(1)),
    },
    "training": {
        "unused-parameters": Expected(FAILURE, on_all(lambda n: (n + 1) / 2),
                                      "not used in producing loss"),
        "forgotten-set-epoch": Expected(SILENT, on_all(lambda n: 3)),
        "same-seed": Expected(SILENT, on_all(lambda n: n)),
        "all-download": Expected(SILENT, on_all(lambda n: 4000)),
        "nan": Expected(SILENT, on_all(lambda n: (n * (n + 1) / 2 - 2) / (n - 1))),
    },
    "silent": {
        "bypassed-wrapper": Expected(SILENT, on_all(lambda n: 0.0), "D1-bypass"),
        "no-sync-last": Expected(SILENT, on_all(lambda n: 0.0), "D2-nosync-last"),
        "unfrozen-late": Expected(SILENT, on_all(lambda n: 0.0), "D3-unfrozen"),
        "other-start": Expected(SILENT, on_all(lambda n: 0.0), "M1-start"),
        "reduce-to-one": Expected(SILENT, on_all(lambda n: 0.0), "M6-reduce"),
        "summed-again": Expected(SILENT, on_all(lambda n: -1.0), "M11-twice"),
        "not-divided": Expected(SILENT, on_all(lambda n: -1.0), "M9-sum"),
        "optimizer-of-a-copy": Expected(SILENT, on_all(lambda n: True), "O1-nograd"),
        "sampler-seeds": Expected(SILENT, on_all(lambda n: 12 * n), "S2-seed"),
        "lost-result": Expected(SILENT, on_all(lambda n: 6.0 * n), "L0-lost"),
    },
    "processes": {
        "killed": Expected(FAILURE, on_all(lambda n: 2 * n * (n + 1)), "SIGKILL", only(1),
                           restarts=1),
        "stopped": Expected(TIMEOUT, TOTAL, Kind.SUSPENDED, only(1)),
        "straggler": Expected(TIMEOUT, on_all(lambda n: 20 * n), Kind.STRAGGLER, only(1)),
        "collective-in-finally": Expected(DEADLOCK, on_all(lambda n: n - 1), Kind.IN_FINALLY,
                                          only(1)),
    },
}  # fmt: skip
"""Expectations of the programs of each module on n ranks, by the name that the command takes."""
PROGRAMS = {
    name: expected for rows in EXPECTED_BY_MODULE.values() for name, expected in rows.items()
}


def find(name: str, suffix: str = "") -> Remote:
    """The function of a program; with the suffix "_cured", of its cure."""
    module = next(module for module, rows in EXPECTED_BY_MODULE.items() if name in rows)
    return remote(f"playground.tools.failures.{module}:{name.replace('-', '_')}{suffix}")


def read_body(function: Remote) -> dict[int, str]:
    """Its lines of code, by number: without its head and its docstring."""
    text = file_of(function.module).read_text(encoding="utf-8")
    node = next(each for each in ast.parse(text).body if getattr(each, "name", "") == function.name)
    assert isinstance(node, ast.FunctionDef)
    first = node.body[ast.get_docstring(node) is not None].lineno
    return dict(enumerate(text.splitlines()[first - 1 : node.end_lineno], first))


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
    is_checked = name in EXPECTED_BY_MODULE["silent"]
    with temporary_folder(TOOL.name) as folder, contextlib.chdir(folder):
        timeout = STALL if expected.symptom == TIMEOUT else DEFAULT_TIMEOUT
        program = find(name)
        ending = run_to_its_end(world, Checked(program, folder) if is_checked else program,
                                timeout=timeout)  # fmt: skip
        mistakes = find_mistakes_of(folder, world.size) if is_checked else []
        world.around = run_as_it_is
        cured = world.run(find(name, "_cured"), timeout=DEFAULT_TIMEOUT, restarts=expected.restarts)
    error, told = ending.error, ending.diagnosis
    words, culprits = str(told or error or ""), told.culprits if told else ()
    if isinstance(error, RankFailed):
        words, culprits = error.headline, (error.rank,)
    symptom = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), SILENT)
    outcome = Outcome(
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
    if mistakes:
        found = mistakes[0]
        outcome = replace(
            outcome, told=tell(found), diagnosis=found.rule, culprits=found.ranks, line=found.where
        )
    return replace(outcome, problem=find_problem(outcome))


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
    checks: list[tuple[str, bool, object]] = [
        (expected.symptom, found.symptom == expected.symptom, found.told or found.results),
        (f"the fix to return {right}", found.cured == right, found.cured),
        ("wrong values", found.results != right, found.results),
        (kind, is_of_kind, told),
        (ranks, are_named, named),
    ]
    problem = next(
        (f"{what}, found {instead or 'none'}" for what, holds, instead in checks if not holds), ""
    )
    return problem and f"{found.name}: expected {problem}"


@session_command(
    TOOL.name,
    click.argument("name", type=OneOf([*PROGRAMS, ALL]), metavar="[NAME]", required=False),
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
    if outcome.name in EXPECTED_BY_MODULE["silent"]:
        name = "No error is raised. With --check hints"
    said: Texts = ["No error is raised."]
    if first == name.lower():  # what is said begins with it
        said = [prose(bad(f"{first}:"), rest)]
    elif outcome.told:
        said = [prose(bad(f"{name}:")), outcome.told]
    return [*said, "", "The fix:", *cure, "", table]


def find_worlds(pid: int) -> list[list[View]]:
    """The flight recorders of each world that process `pid` has started, or is a rank of; of those
    on this host. Raises `UsageError` if there is none."""
    if not Path(f"/proc/{pid}").exists():
        raise UsageError(f"there is no process {pid}: ps -ef lists those that run")
    worlds = {world for box in find_boxes(list_family(pid)) if (world := box.world)}
    if not worlds:
        raise UsageError(
            describe_unrecorded(pid)
            or f"process {pid} has started no ranks that may be looked at: start a script by "
            "python -m playground run -n 2 SCRIPT.py, or examine it by python -m playground doctor "
            "SCRIPT.py"
        )
    boxes = [*find_boxes(int(entry) for entry in os.listdir("/proc") if entry.isdigit())]
    return [[box for box in boxes if box.world == world] for world in sorted(worlds)]


@dataclass(frozen=True)
class UnrecordedRank:
    """A rank that keeps no flight recorder, by what the system says of it."""

    pid: int
    environ: Mapping[str, str]
    words: Sequence[str]
    """Its command line, without the interpreter."""


def find_unrecorded(pid: int) -> Iterator[UnrecordedRank]:
    """The ranks in the family of process `pid`, by the variables that torchrun sets."""
    for member in list_family(pid):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            start, words = (
                Path(f"/proc/{member}/{file}").read_bytes().decode(errors="replace").split("\0")
                for file in ("environ", "cmdline")
            )
            environ = {name: value for name, _, value in (entry.partition("=") for entry in start)}
            if {"RANK", "WORLD_SIZE"} <= environ.keys() and words[1:-1]:
                words = words[1:-1]
                yield UnrecordedRank(member, environ, words[words[0] == "-u" :])


def describe_unrecorded(pid: int) -> str:
    """What is seen from outside of such ranks, and the commands that tell more; empty if there is
    none."""
    if not (ranks := [*find_unrecorded(pid)]):
        return ""
    before = [process_status(rank.pid) for rank in ranks]
    time.sleep(BETWEEN_LOOKS)
    seen = (
        f"rank {rank.environ['RANK']} (process {rank.pid}) "
        f"{describe_activity(was, process_status(rank.pid))}"
        for rank, was in zip(ranks, before, strict=True)
    )
    first = ranks[0]
    words = shlex.join(first.words)
    folder = os.path.realpath(f"/proc/{first.pid}/cwd")
    there = f"cd {shlex.quote(folder)} && " if folder != os.getcwd() else ""
    size = first.environ.get("LOCAL_WORLD_SIZE", first.environ["WORLD_SIZE"])
    ways = [
        f"for who waits for whom, start it by: {there}python -m playground run -n {size} {words}"
    ]
    if first.words[0] != "-m":
        ways.append(f"to examine the script: {there}python -m playground doctor {words}")
    ways.append(f"for a rank's stack: py-spy dump --pid {first.pid}")
    told = "; ".join([", ".join(seen).capitalize(), *ways])
    return f"torchrun alone gives a script no flight recorder. {told}"


def describe_activity(before: Sequence[bytes], now: Sequence[bytes]) -> str:
    """What a process does, by two looks at its status: the state, and ticks of CPU time."""
    if not (before and now):
        return "has ended"
    if now[0] == b"T":
        return "is stopped"
    ticks = sum(map(int, now[11:13])) - sum(map(int, before[11:13]))
    return "computes" if ticks >= COMPUTING else "waits"


def list_family(pid: int) -> Iterator[int]:
    """A process, and those that it has started: its fork server, too, which is no child of it, but
    ends with it."""
    children: dict[int, list[int]] = {}
    needing: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := process_status(int(entry))):
            children.setdefault(int(status[1]), []).append(int(entry))
            for pipe in find_lifelines(int(entry))[1]:
                needing.setdefault(pipe, []).append(int(entry))
    family = [pid]
    for member in family:
        yield member
        kept = [other for pipe in find_lifelines(member)[0] for other in needing.get(pipe, [])]
        new = dict.fromkeys([*children.get(member, []), *kept])
        family += [other for other in new if other not in family]


def look_twice(boxes: Sequence[View]) -> list[RankState]:
    """The state of each rank. One that goes on between two looks is in the program. From outside,
    no deadlock is proved: its launcher does that."""
    before = [box.progress for box in boxes]
    time.sleep(BETWEEN_LOOKS)
    states = [box.read_since(was) for box, was in zip(boxes, before, strict=True)]
    return [
        replace(state, may_act=UNASKED, line=box.ask_for_line())
        if state.doing == Doing.IN_PROGRAM
        else replace(state, may_act=UNASKED)
        for state, box in zip(states, boxes, strict=True)
    ]


def tell_more(states: Sequence[RankState], boxes: Sequence[View]) -> Iterator[str]:
    """The commands that show where ranks are that are in no operation, and do not say so."""
    for state, box in zip(states, boxes, strict=True):
        if state.doing == Doing.IN_PROGRAM and not state.line:
            yield f"where rank {state.rank} is: py-spy dump --pid {box.pid}"


@session_command(
    "why",
    click.argument("pid", type=click.IntRange(min=1)),
    only=("as_json",),
    short_help=TOOLS["why"].purpose,
)
def why_command(session: Session, pid: int) -> None:
    """Say who waits for whom in the run of process PID: that of `python -m playground`, of a script
    that calls `launch()`, of pytest, of a torchrun of one of our commands, or any rank's. The run
    goes on undisturbed.

    Not seen from here: ranks on other hosts. Of a script that torchrun alone has started, it says
    which ranks compute, and the commands that tell more.
    """
    views = find_worlds(pid)
    worlds = [look_twice(boxes) for boxes in views]
    found = [{"ranks": ranks, "diagnosis": diagnosis.diagnose(ranks)} for ranks in worlds]
    told = "\n\n".join(
        "\n".join([diagnosis.tell(ranks), *tell_more(ranks, boxes)])
        for ranks, boxes in zip(worlds, views, strict=True)
    )
    click.echo(to_document({"worlds": found}) if session.run.as_json else told)
