"""The constants of a program: what it assigns to names in capitals, at its top level.

    EPOCHS = 10
    BATCH_SIZE = 128  # of all ranks together

They are read from the text, and another value takes the place of the literal before the program is
compiled: every line keeps its number. Only the program itself sees it: a process that the program
spawns, and which imports the file again, finds what is written there. Does not import torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import decode_source

Value = bool | int | float | str | tuple[int, ...] | tuple[float, ...]
CAPITALS = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant whose value is a literal: a number, a string, a bool, or a tuple of numbers."""

    name: str
    value: Value
    comment: str = ""
    """The comment behind it on its line, or else the comment above it."""
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The names in capitals that a program assigns at its top level."""

    literals: Mapping[str, Constant]
    """Those that can be given another value."""
    computed: Mapping[str, int]
    """By name, the line of any other: an expression, a value of another type, or a name that is
    assigned more than once."""


def read_constants(source: bytes, tree: ast.Module) -> Constants:
    """The constants of a program: its text, and the syntax tree of it."""
    lines = decode_source(source).split("\n")
    literals: dict[str, Constant] = {}
    computed: dict[str, int] = {}
    for name, node in assignments(tree):
        value = None if name in literals or name in computed else read_value(node)
        if value is None:
            literals.pop(name, None)
            computed[name] = node.lineno
        else:
            literals[name] = Constant(
                name=name, value=value, comment=find_comment(lines, node), line=node.lineno
            )
    return Constants(literals=literals, computed=computed)


def assignments(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each name in capitals that is assigned outside functions and classes, with the statement."""
    nodes: list[ast.stmt] = [*tree.body]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
        if inner:
            nodes[:0] = inner
            continue
        for part in ast.walk(node):
            if (
                isinstance(part, ast.Name)
                and isinstance(part.ctx, ast.Store)
                and CAPITALS.fullmatch(part.id)
            ):
                yield part.id, node


def read_value(node: ast.stmt) -> Value | None:
    """The literal that a statement assigns to one name; None if it does anything else."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if len(targets) > 1 or not isinstance(targets[0], ast.Name):
        return None
    try:
        value = ast.literal_eval(node.value)
    except ValueError:
        return None
    if isinstance(value, (bool, int, float, str)):
        return value
    is_numbers = isinstance(value, tuple) and all(type(each) in (int, float) for each in value)
    return value if value and is_numbers else None


def find_comment(lines: list[str], node: ast.stmt) -> str:
    """The comment on the last line of a statement, behind it; or the lines of comment above it."""
    last = lines[(node.end_lineno or node.lineno) - 1].encode()
    behind = last[node.end_col_offset or 0 :].decode().strip()
    if behind.startswith("#"):
        return behind.lstrip("#").strip()
    first = place = node.lineno - 1
    while place and lines[place - 1].startswith("#"):
        place -= 1
    return " ".join(line.lstrip("#").strip() for line in lines[place:first])


def put_values(tree: ast.Module, values: Mapping[str, Value]) -> ast.Module:
    """The program with these values in the place of its literals, each on the literal's lines."""
    for name, node in assignments(tree):
        if name in values and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            literal = ast.parse(repr(values[name]), mode="eval").body
            for part in ast.walk(literal):
                ast.copy_location(part, node.value)
            node.value = literal
    return tree
