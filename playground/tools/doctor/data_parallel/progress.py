"""Lines and bars of progress: only rank 0 shows them, and they count the samples of all ranks. Does
not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from playground.tools.doctor.data_parallel.batches import list_names
from playground.tools.doctor.data_parallel.edits import Edit
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import names_in

SIZE = re.compile(r"^len\(|\.size\(0\)$|\.size\(\)\[0\]$|\.shape\[0\]$|\.batch_size$")
"""The text of an expression that may be the number of samples of a batch."""


def find_bars(script: TrainingScript) -> list[ast.Call]:
    """The calls that make a bar of progress."""
    text = script.text
    tracks = (
        each for each in text.find_calls("track") if text.dotted(each.func).startswith("rich")
    )
    found = (*text.find_calls("tqdm", "trange"), *tracks)
    return [each for each in found if text.resolve(each) is None]


def show_bars_on_first(script: TrainingScript) -> Iterator[Edit]:
    """The changes by which only rank 0 shows bars of progress."""
    for bar in find_bars(script):
        if not any(each.arg in ("disable", None) for each in bar.keywords):
            yield script.add_argument(bar, f"disable={script.rank_at(bar)} != 0")


def count_all(script: TrainingScript) -> Iterator[Edit]:
    """The changes by which what the loop shows of its progress counts the samples of all ranks: the
    number of the batch times its size, and what a bar of all samples is moved by."""
    if not script.loop or script.walks_several:
        return
    names = follow_batch(script, script.loop)
    for node in ast.walk(script.loop):
        if isinstance(node, ast.Call):
            given = node.args[0] if is_step_of_bar(script, node) else None
            if given and is_size(script, given, names):
                yield multiply(script, given)
        elif isinstance(node, ast.BinOp) and is_shown_count(script, node, names):
            yield multiply(script, node)


def multiply(script: TrainingScript, node: ast.expr) -> Edit:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return Edit(end, end, f" * {script.size}")


def follow_batch(script: TrainingScript, loop: ast.For) -> set[str]:
    """The names of a batch in the loop, and of what is made from them."""
    names = {*list_names(loop.target)}
    names -= {count_of(script, loop)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and names & names_in(node.value):
            names |= {name for each in node.targets for name in list_names(each)}
    return names


def count_of(script: TrainingScript, loop: ast.For) -> str:
    """The name of the number of the batch; empty if there is none."""
    is_counted = isinstance(loop.iter, ast.Call) and "enumerate(" in ast.unparse(loop.iter)
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
    return first.id if is_counted and isinstance(first, ast.Name) else ""


def is_size(script: TrainingScript, node: ast.expr, batch: Collection[str]) -> bool:
    """Whether it is the number of samples of a batch, which is a part on each rank."""
    words, owner = ast.unparse(node), getattr(node, "value", None)
    is_loader = bool({*script.loaders} & script.text.makers(owner))
    of_batch = bool(names_in(node) & {*batch}) and not words.endswith(".batch_size")
    return bool(SIZE.search(words)) and (of_batch or is_loader)


def is_count(script: TrainingScript, product: ast.BinOp, batch: Collection[str]) -> bool:
    """Whether it is the number of the batch times that of its samples, `i * len(x)`."""
    assert script.loop
    number, sides = count_of(script, script.loop), (product.left, product.right)
    return (
        isinstance(product.op, ast.Mult)
        and any(number in names_in(each) for each in sides)
        and any(is_size(script, each, batch) for each in sides)
    )


def is_shown_count(script: TrainingScript, node: ast.BinOp, batch: Collection[str]) -> bool:
    return is_count(script, node, batch) and is_shown(script, node) and has_place(script, node)


def is_shown(script: TrainingScript, node: ast.expr) -> bool:
    """Whether its value is printed, and nothing else."""
    text, statement = script.text, script.text.statement_of(node)
    if not isinstance(statement, ast.Assign):
        return script.is_log(statement)
    targets, value = statement.targets[0], statement.value
    if isinstance(value, ast.Tuple) and isinstance(targets, ast.Tuple):
        pairs = zip(targets.elts, value.elts, strict=False)
        targets = next((to for to, each in pairs if each is node), targets)
    reads = [
        each
        for each in ast.walk(text.function_of(statement) or text.tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        if isinstance(targets, ast.Name) and each.id == targets.id
    ]
    return bool(reads) and all(script.is_log(text.statement_of(each)) for each in reads)


def has_place(script: TrainingScript, node: ast.expr) -> bool:
    """Whether the text is at the place that `ast` says: in an f-string of several lines, before
    Python 3.12, it may not be."""
    try:
        found = ast.parse(script.text.code(node).strip(), mode="eval").body
    except SyntaxError:
        return False
    return ast.dump(found) == ast.dump(node)


def is_step_of_bar(script: TrainingScript, call: ast.Call) -> bool:
    """Whether it moves a bar that has a total: `bar.update(len(x))`."""
    func, totals = call.func, {*find_bars(script)}
    if not (isinstance(func, ast.Attribute) and func.attr == "update" and len(call.args) == 1):
        return False
    named = {
        ast.unparse(item.optional_vars)
        for node in ast.walk(script.text.tree)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars and item.context_expr in totals
    }
    made = script.text.makers(func.value) & totals
    return bool(made) or ast.unparse(func.value) in named
