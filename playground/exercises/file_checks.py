"""What is wrong with a file before it is run. Does not import torch."""

from __future__ import annotations

import ast
import symtable

from playground.exercises.exercise import FIND, Exercise
from playground.exercises.repair import MOST_CHANGED, SEED

NOT_WRITTEN = "not written yet"
OURS: tuple[list[str], ...] = [], ["world"], ["world", "launcher"]
"""Packages of the playground that a solution may import, by the parts of their names, and all that
is in the last of them: its own program starts ranks with them."""


def find_fault(exercise: Exercise, text: str) -> str:
    """The fault of a file before it is run, in one line; empty if there is none."""
    again = f"begin again: python -m playground exercise {exercise.name} --reset"
    if exercise.kind == FIND:
        if fault := find_fault_in_repair(exercise, text, again):
            return fault
    elif text == exercise.stub:
        return NOT_WRITTEN
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        return f"line {error.lineno or 1}: {error.msg}" + (f": {line}" if line else "")
    if fault := find_import_of_ours(tree):
        return fault
    if lacks_function(exercise, text):
        return f"there is no function {exercise.function} in it; {again}"
    return find_start_of_ranks(tree)


def find_fault_in_repair(exercise: Exercise, text: str, again: str) -> str:
    """That a program to be repaired has lost its seed, or has more changes than a repair takes;
    empty if it has not."""
    if not SEED.search(text):
        return f"there is no line SEED = … in it; {again}"
    changed = len(exercise.repair.find_changes(text))
    if changed <= MOST_CHANGED:
        return ""
    if exercise.repair.is_of_another_seed(text):
        return (
            f"SEED is {exercise.seed}, and this file was drawn with another number: write that "
            f"again, or {again}"
        )
    return f"{changed} lines are changed, and the fault takes {MOST_CHANGED} at most; {again}"


def find_import_of_ours(tree: ast.Module) -> str:
    """The line that imports what the solution is to write itself; empty if there is none."""
    for node in ast.walk(tree):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else modules:
            top, *inner = name.split(".")[:3]
            if top == "playground" and inner not in OURS:
                return f"line {getattr(node, 'lineno', 0)} imports {name}: write it yourself"
    return ""


def find_start_of_ranks(tree: ast.Module) -> str:
    """The line that starts ranks when the file is imported; empty if there is none."""
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.rpartition(".")[2] in ("launch", "spawn"):
                return (
                    f"line {node.lineno} starts ranks: put {called}(…) under if __name__ == "
                    "'__main__':"
                )
    return ""


def lacks_function(exercise: Exercise, text: str) -> bool:
    """Whether the file defines no function of the exercise's name. Raises `SyntaxError`."""
    names = symtable.symtable(text, exercise.file, "exec").get_symbols()
    return not any(
        name.get_name() == exercise.function and (name.is_assigned() or name.is_imported())
        for name in names
    )
