"""In a rank: what the source of the program says of a call: whether it is given a copy that nobody
else has, so that its result is lost, and whether its input is put into its result."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from types import FrameType
from typing import Any

from torch import Tensor

from playground.explain.right.facts import COPY, LOST

COPIES = {"half", "float", "double", "bfloat16", "to", "type", "cpu", "cuda"}
"""Methods of tensors that return a copy, if there is something to change."""


def find_loss(frame: FrameType, tensor: Any) -> str:
    """LOST or COPY, if the call that this frame makes is given a copy of one of its variables; else
    empty. LOST is a copy that only makes the tensor dense: nobody wants it for itself."""
    call = call_of(frame)
    given = call.args[0] if call is not None and call.args else None
    if not isinstance(given, ast.Call) or not isinstance(given.func, ast.Attribute):
        return ""
    method, owner = given.func.attr, given.func.value
    if method not in {"contiguous", *COPIES} or not isinstance(owner, ast.Name):
        return ""
    variable = frame.f_locals.get(owner.id, frame.f_globals.get(owner.id))
    if not isinstance(variable, Tensor) or variable.data_ptr() == tensor.data_ptr():
        return ""
    return LOST if method == "contiguous" else COPY


def call_of(frame: FrameType) -> ast.Call | None:
    """The call that a frame is making, as its source has it; None if that is not known."""
    positions = [*frame.f_code.co_positions()]
    place = positions[frame.f_lasti // 2] if frame.f_lasti >= 0 else (None,) * 4
    return calls_in(frame.f_code.co_filename).get(place)


def puts_back(frame: FrameType) -> bool:
    """Whether the function of this frame puts what the call is given second into a place of a list,
    as `parts[rank] = features` does."""
    call = call_of(frame)
    given = call.args[1] if call is not None and len(call.args) > 1 else None
    if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute):
        given = given.func.value  # of features.contiguous()
    return isinstance(given, ast.Name) and given.id in put_in(
        frame.f_code.co_filename, frame.f_code.co_name
    )


@cache
def put_in(file: str, function: str) -> frozenset[str]:
    """The names of variables that the functions of this name assign to places of lists or tensors,
    or the whole file if it has none."""
    tree = parse_known(file)
    functions: list[ast.AST] = [
        each for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == function
    ]  # fmt: skip
    return frozenset(
        each.value.id
        for part in functions or [tree]
        for each in ast.walk(part)
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Subscript)
        and isinstance(each.value, ast.Name)
    )


@cache
def calls_in(file: str) -> dict[tuple[int | None, ...], ast.Call]:
    """The calls of a file by their places: first and last line, first and last column."""
    return {
        (each.lineno, each.end_lineno, each.col_offset, each.end_col_offset): each
        for each in ast.walk(parse_known(file))
        if isinstance(each, ast.Call)
    }


def parse_known(file: str) -> ast.AST:
    """The syntax tree of a file; an empty one if it is not known."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])
