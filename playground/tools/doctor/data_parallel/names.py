"""Names that a text uses where nothing has bound them. Does not import torch."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping

from playground.tools.doctor.data_parallel.text import Function

Scope = ast.Module | ast.ClassDef | Function
NAMED = Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
KNOWN = {*dir(builtins), "__file__"}


def find_unbound(source: str) -> set[tuple[str, str]]:
    """The names that are used before the line that binds them, or are bound nowhere, each behind
    the name of its function. Empty for a text with `import *`. Raises `SyntaxError`."""
    tree = ast.parse(source)
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree)):
        return set()
    return {*unbound_in(tree, "", {}, bound_in(tree), is_at_once=True)}


def unbound_in(
    scope: Scope, path: str, outer: Mapping[str, int], module: Mapping[str, int], is_at_once: bool
) -> Iterator[tuple[str, str]]:
    """Those of a scope and of what is in it. `outer`, `module`: what functions around it bind, and
    what the module does, each with its first line. `is_at_once`: it runs where it stands."""
    own = bound_in(scope)
    for node in own_nodes(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            place = own if node.id in own else outer if node.id in outer else module
            waits = place is outer or (place is module and not is_at_once)
            first = place.get(node.id, 0 if node.id in KNOWN else None)
            if first is None or (node.lineno < first and not waits):
                yield path, node.id
        elif isinstance(node, Function):
            inner = outer if isinstance(scope, ast.Module | ast.ClassDef) else {**outer, **own}
            yield from unbound_in(node, f"{path}.{node.name}", inner, module, is_at_once=False)
        elif isinstance(node, ast.ClassDef):
            inner = {**outer, **own} if isinstance(scope, Function) else outer
            yield from unbound_in(node, f"{path}.{node.name}", inner, module, is_at_once)


def own_nodes(scope: Scope) -> Iterator[ast.AST]:
    """The nodes that run when the scope does: of a function in it, the decorators and defaults."""
    left: list[ast.AST] = [*scope.body]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, Function):
            left += [
                *node.decorator_list,
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
            ]
        elif isinstance(node, ast.ClassDef):
            left += [*node.decorator_list, *node.bases, *(each.value for each in node.keywords)]
        else:
            left.extend(ast.iter_child_nodes(node))


def bound_in(scope: Scope) -> dict[str, int]:
    """The names that a scope binds, each with the first line that does."""
    elsewhere, found = set[str](), dict[str, int]()
    given = [scope.args] if isinstance(scope, Function) else []
    nodes = [*own_nodes(scope), *(node for each in given for node in ast.walk(each))]
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            elsewhere.update(node.names)
        for name in bound_by(node):
            found[name] = min(found.get(name, node.lineno), node.lineno)  # type: ignore[attr-defined]
    return {name: line for name, line in found.items() if name not in elsewhere}


def bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield from [node.id] if isinstance(node.ctx, ast.Store) else []
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, NAMED):
        yield from [node.name] if node.name else []
    elif isinstance(node, ast.MatchMapping):
        yield from [node.rest] if node.rest else []
