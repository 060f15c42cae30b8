"""In a rank that stays: run the program of a lesson, or a step of it, as a cell. Its functions and
classes are left in the namespace, and so are the variables of those functions that it calls. Does
not import torch before it is in a rank."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from playground.base.constants import Value, put_values
from playground.play.cells import Outcome, evaluate, given, guarded, namespace

FORM_OR_LEAVE = "dist.init_process_group", "dist.destroy_process_group"
IS_MAIN = "__name__ == '__main__'"
KEEP_VARIABLES = "globals().update(locals())"


@dataclass(frozen=True)
class LessonProgram:
    """The program of a lesson."""

    file: Path
    constants: tuple[tuple[str, Value], ...] = ()
    """Names of constants, and the values that they have instead of those in the file."""
    needs_mnist: bool = False
    data: str = ""
    """The folder in which it finds MNIST."""


def run_lesson(program: LessonProgram, rank: int, size: int, number: int, source: str) -> Outcome:
    """Run `source`, the text of the program."""
    file = str(program.file)

    def run() -> str | None:
        import torch

        from playground.training.prepare import DATA_DIR
        from playground.world.backends import on_device

        dtype = torch.get_default_dtype()
        names = vars(namespace)
        kept, words = {name: names[name] for name in given & {*names}}, sys.argv
        folder = os.environ.get(DATA_DIR)
        sys.argv = [file]
        if program.data:
            os.environ[DATA_DIR] = program.data
        try:
            with on_device(), warnings.catch_warnings():
                warnings.simplefilter("ignore" if rank else "once")  # all ranks have the same ones
                tree = put_values(ast.parse(source, file), dict(program.constants))
                return evaluate(to_cell(tree), file)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)  # as the interpreter does
            return None
        finally:
            torch.set_default_dtype(dtype)  # a program's choice would change the cells that follow
            names.update(kept)
            sys.argv = words
            if folder is None:
                os.environ.pop(DATA_DIR, None)
            else:
                os.environ[DATA_DIR] = folder

    return guarded(run)


def to_cell(tree: ast.Module) -> ast.Module:
    """The program as it runs in a world that stands."""
    programs = [node for node in tree.body if isinstance(node, ast.If)]
    programs = [node for node in programs if ast.unparse(node.test) == IS_MAIN]
    definitions = [node for node in tree.body if node not in programs]
    program = [statement for node in programs for statement in node.body]
    called = {node.id for part in program for node in ast.walk(part) if isinstance(node, ast.Name)}
    for node in definitions:
        if isinstance(node, ast.FunctionDef) and node.name in called:
            keep = [ast.copy_location(each, node) for each in ast.parse(KEEP_VARIABLES).body]
            first = int(ast.get_docstring(node) is not None)
            body = node.body[first:]
            node.body[first:] = [ast.Try(body=body, handlers=[], orelse=[], finalbody=keep)]
    whole = InStandingWorld().visit(ast.Module([*definitions, *program], []))
    return ast.fix_missing_locations(whole)


class InStandingWorld(ast.NodeTransformer):
    """Leaves out what forms the process group, and destroys it: it stays."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) in FORM_OR_LEAVE:
            return ast.copy_location(ast.Pass(), node)
        return node
