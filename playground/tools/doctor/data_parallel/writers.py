"""Objects that write or send a log, as a SummaryWriter does, or a run of wandb or mlflow: only rank
0 has one. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from playground.tools.doctor.data_parallel.edits import Edit, replace_node
from playground.tools.doctor.data_parallel.script import TrainingScript

MADE_BY = {"mlflow.start_run": "starts a run"}
"""Functions of other packages whose results log, besides SummaryWriter; and what each does."""
RUN = "wandb.init"
"""Its run sends nothing in the mode "disabled", and can be called as any other."""
TESTS = ast.Compare, ast.BoolOp, ast.UnaryOp


@dataclass(frozen=True)
class Writer:
    """An object that logs, and is used by its name."""

    call: ast.Call
    """What makes it."""
    statements: tuple[ast.stmt, ...]
    """Those that do nothing but use it."""
    other: ast.AST | None
    """A use for which each rank needs the object; None if there is none."""


def find_writers(script: TrainingScript) -> list[Writer]:
    """Those that the script makes on each rank."""
    text = script.text
    return [
        read_writer(script, call)
        for call in text.calls
        if makes_writer(script, call) and not script.is_for_first(call)
        if not isinstance(text.parents[call], ast.Expr)
    ]


def makes_writer(script: TrainingScript, call: ast.Call) -> bool:
    text = script.text
    is_own = text.resolve(call) is not None or text.called(call) in text.classes
    is_known = text.called(call) == "SummaryWriter" or text.dotted(call.func) in MADE_BY
    return is_known and not is_own


def is_on_first(script: TrainingScript, call: ast.Call) -> bool:
    """Whether `... if rank == 0 else None` has it."""
    around = (each for each in script.text.climb(call) if isinstance(each, ast.IfExp))
    return any(any(map(script.is_rank, ast.walk(each.test))) for each in around)


def read_writer(script: TrainingScript, call: ast.Call) -> Writer:
    text, statements = script.text, dict[ast.stmt, None]()
    other: ast.expr | None = None if find_place(script, call) else call
    for node in find_uses(script, call):
        statement = text.statement_of(node)
        if can_be_none(script, node):
            continue
        if not isinstance(statement, ast.Expr) or is_passed(script, node):
            other = other or node
        elif not is_tested(script, node):
            statements[statement] = None
    return Writer(call, tuple(statements), other)


def find_place(script: TrainingScript, call: ast.Call) -> ast.AST | None:
    """Where an object gets a name, or is passed to a function of the script's own; None if that is
    not seen."""
    parent = script.text.parents[call]
    while isinstance(parent, ast.IfExp | ast.Tuple):
        parent = script.text.parents[parent]
    if isinstance(parent, ast.Assign | ast.AnnAssign):
        return parent if gives_names(script, parent) else None
    if isinstance(parent, ast.withitem):
        is_named = parent.optional_vars is None or isinstance(parent.optional_vars, ast.Name)
        return parent if is_named else None
    return parent if isinstance(parent, ast.Return) or is_bound(script, call) else None


def find_uses(script: TrainingScript, call: ast.Call) -> Iterator[ast.expr]:
    """Where the object is read by its name, or as an attribute."""
    text, item = script.text, script.text.parents[call]
    given = getattr(item, "optional_vars", None)
    attributes = {
        node.attr
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Attribute) and call in text.makers(node)
    }
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        is_of_other = isinstance(node, ast.Attribute) and (
            node.attr in attributes and not text.makers(node)  # trainer.writer
        )
        is_given = given is not None and text.key_of(node) == text.key_of(given)
        if is_of_other or is_given or call in text.makers(node):
            yield node


def can_be_none(script: TrainingScript, node: ast.expr) -> bool:
    """Whether a use only hands the object on, or asks whether there is one."""
    inner: ast.AST = node
    parent = script.text.parents[node]
    while isinstance(parent, TESTS):
        inner, parent = parent, script.text.parents[parent]
    if isinstance(parent, ast.If | ast.IfExp) and parent.test is inner:
        return True
    if isinstance(parent, ast.Tuple):
        inner, parent = parent, script.text.parents[parent]
    if isinstance(parent, ast.Assign) and parent.value is inner:
        return gives_names(script, parent)
    return isinstance(parent, ast.Return) or is_bound(script, node)


def gives_names(script: TrainingScript, statement: ast.Assign | ast.AnnAssign) -> bool:
    """Whether what is assigned gets names that are followed."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    named = [one for each in targets for one in getattr(each, "elts", [each])]
    return all(map(script.text.key_of, named))


def is_bound(script: TrainingScript, node: ast.expr) -> bool:
    """Whether it is an argument of a function of the script's own, in which its uses are seen."""
    parent = script.text.parents[node]
    call = script.text.parents[parent] if isinstance(parent, ast.keyword) else parent
    return isinstance(call, ast.Call) and any(given is node for _, given in script.text.bind(call))


def is_passed(script: TrainingScript, node: ast.expr) -> bool:
    """Whether it is an argument of another function, which may need it."""
    return not isinstance(script.text.parents[node], ast.Attribute)


def is_tested(script: TrainingScript, node: ast.expr) -> bool:
    """Whether a condition around it asks for the object: `if writer:`."""
    words = ast.unparse(node)
    tests = (each.test for each in script.text.climb(node) if isinstance(each, ast.If))
    return any(words in map(ast.unparse, ast.walk(test)) for test in tests)


def make_on_first(script: TrainingScript, writer: Writer) -> list[Edit]:
    """The changes by which other ranks have None in its place."""
    call, parent = writer.call, script.text.parents[writer.call]
    if writer.other or is_on_first(script, call):
        return []
    end = call.end_lineno or 0, call.end_col_offset or 0
    other = "contextlib.nullcontext()" if isinstance(parent, ast.withitem) else "None"
    first, last = "", f" if {script.rank_at(call)} == 0 else {other}"
    if isinstance(parent, ast.IfExp):
        first, last = "(", f"{last})"
    start = call.lineno, call.col_offset
    return [Edit(start, start, first), Edit(end, end, last)]


def note_writer(script: TrainingScript, writer: Writer) -> str:
    """What is said of an object that other ranks need, too."""
    call = writer.call
    does = MADE_BY.get(script.text.dotted(call.func), "writes a log of its own to one folder")
    needs = writer.other if writer.other is not call else None
    where = f", and {script.at(needs)} needs it" if needs else ""
    rank = script.rank_at(call)
    return (
        f"{script.at(call)}: each rank {does}{where}. Make it under `if {rank} == 0:`, and use it "
        "only there"
    )


def find_runs(script: TrainingScript) -> list[ast.Call]:
    """The calls of `wandb.init` on all ranks."""
    return [
        call
        for call in script.text.find_calls("init")
        if script.text.dotted(call.func) == RUN and not script.is_for_first(call)
    ]


def disable_on_others(script: TrainingScript, run: ast.Call) -> Iterator[Edit]:
    """The change by which a run of wandb is disabled on other ranks: its configuration is there,
    and nothing is sent."""
    condition = f"if {script.rank_at(run)} == 0 else"
    mode = next((each.value for each in run.keywords if each.arg == "mode"), None)
    if mode is None:
        yield script.add_argument(run, f'mode=None {condition} "disabled"')
    elif not any(map(script.is_rank, ast.walk(mode))):
        yield replace_node(mode, f'{script.text.operand(mode)} {condition} "disabled"')
