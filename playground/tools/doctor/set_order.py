"""Sets that a program walks in their own order. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from playground.tools.doctor.checks import Fault, warning

FREE_OF_ORDER = {"sorted", "set", "frozenset", "len", "sum", "min", "max", "any", "all"}
"""Calls whose result does not depend on the order of their argument."""
IN_ORDER = {"list", "tuple", "enumerate", "iter", "zip", "map", "fromkeys", "join", "extend"}
"""Calls whose result has the order of their argument."""


def find_set_order(path: Path) -> Iterator[Fault]:
    """What the text of the script in `path` shows of an order that differs between ranks which are
    no forks of one process."""
    for line in sets_walked(ast.parse(path.read_bytes())):
        saw = f"a set is walked in its own order ({path.name}:{line})"
        rule = (
            "strings in a set have another order on each rank: each process of torchrun draws "
            "its own seed of hashes"
        )
        yield warning(saw, rule, "walk sorted(…), or use a dict for a set that keeps its order")


def sets_walked(tree: ast.Module) -> list[int]:
    """The lines on which a set, unless it is one of numbers, is walked where its order counts."""
    nodes = [*ast.walk(tree)]
    names: dict[str, bool] = {}
    for node in nodes:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if (
                isinstance(target, ast.Name)
                and isinstance(node, (ast.Assign, ast.AnnAssign))
                and node.value
            ):
                names[target.id] = names.get(target.id, True) and is_set(node.value, {})
    free = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.SetComp)
        or (isinstance(node, ast.Call) and name_of_call(node) in FREE_OF_ORDER)
        for inner in (node.generators if isinstance(node, ast.SetComp) else [*walk_arguments(node)])
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.For) or (
            isinstance(node, ast.comprehension) and id(node) not in free
        ):
            walked = [node.iter]
        elif isinstance(node, ast.Call) and name_of_call(node) in IN_ORDER and id(node) not in free:
            walked = node.args
        else:
            continue
        found |= {each.lineno for each in walked if is_set(each, names)}
    return sorted(found)


def walk_arguments(call: ast.Call) -> Iterator[ast.AST]:
    """The arguments, and where one is a generator or a list of its own making, what it walks."""
    for each in call.args:
        yield each
        yield from getattr(each, "generators", ())


def name_of_call(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def is_set(node: ast.expr, names: Mapping[str, bool]) -> bool:
    """Whether it is a set, of whose elements none is known to be a number. `names`: those of
    sets."""
    if isinstance(node, ast.Set):
        return not all(
            isinstance(each, ast.Constant) and not isinstance(each.value, str) for each in node.elts
        )
    if isinstance(node, ast.BinOp):
        return is_set(node.left, names) or is_set(node.right, names)
    if isinstance(node, ast.Call):
        of_numbers = any(
            isinstance(each, ast.Call) and name_of_call(each) == "range" for each in node.args
        )
        return name_of_call(node) in ("set", "frozenset") and not of_numbers
    return isinstance(node, ast.SetComp) or (
        isinstance(node, ast.Name) and names.get(node.id, False)
    )
