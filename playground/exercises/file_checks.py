"""What is wrong with a file before it is run. Does not import torch."""

from __future__ import annotations

import ast
import symtable

from playground.exercises.exercise import FIND, Exercise
from playground.exercises.repair import MOST_CHANGED, SEED

NOT_WRITTEN = "not written yet"
OURS: tuple[list[str], ...] = [], ["world"], ["world", "launcher"]
"""Packages of the playground that a solution may import: its own program starts ranks with them."""


def find_fault(exercise: Exercise, text: str) -> str:
    """The fault of a file before it is run, in one line; empty if there is none."""
    again = f"begin again: python -m playground exercise {exercise.name} --reset"
    if exercise.kind == FIND:
        if not SEED.search(text):
            return f"there is no line SEED = … in it; {again}"
        changed = len(exercise.repair.find_changes(text))
        if changed > MOST_CHANGED and exercise.repair.is_of_another_seed(text):
            return (
                f"SEED is {exercise.seed}, and this file was drawn with another number: write that "
                f"again, or {again}"
            )
        if changed > MOST_CHANGED:
            return (
                f"{changed} lines are changed, and the fault takes {MOST_CHANGED} at most; {again}"
            )
    elif text == exercise.stub:
        return NOT_WRITTEN
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno or 1}: {error.msg}"
    for node in ast.walk(tree):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else modules:
            if name.split(".")[0] == "playground" and name.split(".")[1:3] not in OURS:
                return f"line {getattr(node, 'lineno', 0)} imports {name}: write it yourself"
    if lacks_function(exercise, text):
        return f"there is no function {exercise.function} in it; {again}"
    for node in tree.body:
        called = (
            ast.unparse(node.value.func)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            else ""
        )
        if called.rpartition(".")[2] in ("launch", "spawn"):
            return (
                f"line {node.lineno} starts ranks: put {called}(…) under if __name__ == '__main__':"
            )
    return ""


def lacks_function(exercise: Exercise, text: str) -> bool:
    """Whether the file defines no function of the exercise's name. Raises `SyntaxError`."""
    names = symtable.symtable(text, exercise.file, "exec").get_symbols()
    return not any(
        name.get_name() == exercise.function and (name.is_assigned() or name.is_imported())
        for name in names
    )
