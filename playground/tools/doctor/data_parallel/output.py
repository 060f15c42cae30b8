"""The part of output: what prints, logs and saves, only rank 0 may. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from playground.tools.doctor.data_parallel.edits import Edit, put_under, replace_node
from playground.tools.doctor.data_parallel.metrics import find_library
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.progress import count_all, show_bars_on_first
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Function
from playground.tools.doctor.data_parallel.writers import (
    Writer,
    disable_on_others,
    find_runs,
    find_writers,
    make_on_first,
    note_writer,
)

PLAIN = {
    *("abs", "enumerate", "float", "format", "int", "items", "item", "join", "len", "max", "min"),
    *("range", "round", "sorted", "str", "sum", "tolist", "zip"),
}
"""Calls that neither draw a random number nor meet another rank."""


def find_logging(script: TrainingScript) -> Part:
    """What prints, logs and saves: only rank 0 may."""
    name, text = "logging and saving by rank 0", script.text
    runs = find_runs(script)
    writers = [keep_for_all(script, each) for each in find_writers(script)]
    found = [
        node
        for node in ast.walk(text.tree)
        if isinstance(node, ast.stmt) and script.is_log(node)
        if not (runs and is_of_wandb(script, node))  # whose runs are disabled on other ranks
    ]
    found += [each for writer in writers for each in writer.statements]
    apart = [each for each in dict.fromkeys(found) if not script.is_for_first(each)]
    notes = list[str]()
    edits = [
        *log_on_first(script, apart, notes),
        *(one for each in runs for one in disable_on_others(script, each)),
        *(one for each in writers for one in make_on_first(script, each)),
        *write_on_first(script),
        *show_bars_on_first(script),
    ]
    notes += (note_writer(script, each) for each in writers if each.other)
    if not (edits or notes):
        if found or runs:
            first = script.at((found or runs)[0])
            return Part(name, Status.THERE, f"{first} is under a condition on the rank")
        saw = "no print, save or log is seen"
        return Part(name, Status.NOT_NEEDED, saw, [*make_folders_once(script)])
    status = Status.MISSING if edits else Status.UNKNOWN
    saw = "all ranks would print, and write one file at once"
    edits += [*make_folders_once(script), *count_all(script)]
    return Part(name, status, saw, edits, notes)


def keep_for_all(script: TrainingScript, writer: Writer) -> Writer:
    """The writer, with a statement for which each rank needs it, as that is under no condition."""
    kept = next((each for each in writer.statements if tell_obstacle(script, each)), None)
    return replace(writer, other=kept) if kept and not writer.other else writer


def is_of_wandb(script: TrainingScript, statement: ast.stmt) -> bool:
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    return script.text.dotted(statement.value.func).startswith("wandb.")


def log_on_first(
    script: TrainingScript, apart: Sequence[ast.stmt], notes: list[str]
) -> Iterator[Edit]:
    """The changes by which only rank 0 comes to these statements. Adds why one has none."""
    called = {each: call_before(script, each) for each in apart}
    for edits in called.values():
        yield from edits
    for first, last in group(script, [each for each in apart if not called[each]], notes):
        condition = f"{script.rank_at(first)} == 0"
        indent = script.indent_of(first)
        yield from put_under(condition, first.lineno, last.end_lineno or 0, indent)


def write_on_first(script: TrainingScript) -> Iterator[Edit]:
    """The changes by which other ranks write files to nowhere."""
    for call in script.text.calls:
        file = None if script.is_for_first(call) else script.find_written(call)
        if file is None or any(map(script.is_rank, ast.walk(file))):
            continue
        words = f"{script.text.code(file)} if {script.rank_at(call)} == 0 else os.devnull"
        if isinstance(call.func, ast.Attribute) and call.func.value is file:  # path.open("w")
            given = call.args[0] if call.args else call.keywords[0]
            begin, first = (call.lineno, call.col_offset), replace_node(given, "").start
            yield Edit(begin, first, f"open({words}, ")
        else:
            yield replace_node(file, words)


def make_folders_once(script: TrainingScript) -> Iterator[Edit]:
    """The changes by which a folder that another rank has made is no error."""
    text = script.text
    for call in text.find_calls("mkdir", "makedirs"):
        if any(each.arg in ("exist_ok", None) for each in call.keywords):
            continue
        if text.dotted(call.func) == "os.mkdir":
            yield replace_node(call.func, "os.makedirs")
        yield script.add_argument(call, "exist_ok=True")


def group(
    script: TrainingScript, statements: Sequence[ast.stmt], notes: list[str]
) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """The first and the last of statements that follow each other and can be put under one
    condition. Adds why one cannot."""
    good = []
    for each in sorted(statements, key=lambda one: one.lineno):
        if obstacle := tell_obstacle(script, each):
            notes.append(obstacle)
        else:
            good.append(each)
    while good:
        first = last = good.pop(0)
        siblings = siblings_of(script, first)
        while (
            good
            and siblings.index(last) + 1 < len(siblings)
            and (siblings[siblings.index(last) + 1] is good[0])
        ):
            last = good.pop(0)
        yield first, last


def tell_obstacle(script: TrainingScript, statement: ast.stmt) -> str:
    """Why a statement cannot be put under a condition; empty if it can."""
    calls = (call for call in ast.walk(statement) if isinstance(call, ast.Call))
    if meeting := next((call for call in calls if meets(script, call)), None):
        words = ast.unparse(meeting.func)
        return (
            f"{script.at(statement)} calls {words}, in which all ranks meet: assign its "
            f"result first, on all ranks, then print under `if {script.rank} == 0:`"
        )
    if not script.stands_alone(statement):
        return f"{script.at(statement)} shares its line: {tell_condition(script, statement)}"
    if script.has_long_string(statement):
        return (
            f"{script.at(statement)} has a string of several lines, which an indent would change: "
            f"{tell_condition(script, statement)}"
        )
    return ""


def tell_condition(script: TrainingScript, statement: ast.stmt) -> str:
    return f"put it under `if {script.rank_at(statement)} == 0:`, too"


def call_before(script: TrainingScript, statement: ast.stmt) -> list[Edit]:
    """Where a print calls the script's own function: that is called before it, on all ranks, which
    may meet there, or draw random numbers. Empty if there is no call, or it takes more than one
    line."""
    text = script.text
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return []
    [shown] = call.args
    calls = [node for node in ast.walk(shown) if isinstance(node, ast.Call)]
    own = [each for node in calls if (each := text.resolve(node)) and not is_plain(script, each)]
    meet = [node for node in calls if text.called(node) == "compute" and find_library(script)]
    line, indent = text.lines[call.lineno - 1], script.indent_of(statement)
    is_one_line = call.lineno == call.end_lineno and line.strip() == text.code(statement)
    if not is_one_line or not (own or meet):
        return []
    name, begin = text.fresh("shown"), (call.lineno, call.col_offset)
    first, last = replace_node(shown, "").start, replace_node(shown, "").end
    under = f"{indent}if {script.rank_at(call)} == 0:\n{indent}    {text.code(call.func)}({name})"
    return [
        Edit(begin, first, f"{name} = "),
        Edit(last, (call.lineno, call.end_col_offset or 0), f"  # on all ranks\n{under}"),
    ]


def is_plain(script: TrainingScript, function: Function) -> bool:
    """Whether a function of the script's makes texts and numbers alone, so that one rank may call
    it."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return all(script.text.called(call) in PLAIN for call in calls)


def siblings_of(script: TrainingScript, node: ast.stmt) -> list[ast.stmt]:
    parent = script.text.parents[node]
    lists = (value for value in vars(parent).values() if isinstance(value, list))
    return next(each for each in lists if node in each)


def meets(script: TrainingScript, call: ast.Call, known: tuple[int, ...] = ()) -> bool:
    """Whether all ranks meet in the script's own function that is called."""
    function = script.text.resolve(call)
    if function is None or id(function) in known:
        return False
    trains = any(
        script.text.called(each) == "backward"
        for each in ast.walk(function)
        if isinstance(each, ast.Call)
    )
    return (
        trains
        or id(function) in script.collective
        or any(
            meets(script, each, (*known, id(function)))
            for each in ast.walk(function)
            if isinstance(each, ast.Call)
        )
    )
