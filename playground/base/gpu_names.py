"""GPUs that the text of a program names by their number. Does not import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

OF_ONE_RANK = re.compile(r"rank|main|master", re.IGNORECASE)
"""In a condition that holds on one rank, or an index that is another one on each."""


def find_named_gpus(source: bytes) -> Iterator[tuple[int, str]]:
    """The lines of a program in which a tensor may get to a GPU that the text names by its number,
    each with the GPU: (43, "cuda:0"). Left out are lines under a condition on the rank, what it
    chooses from, keys of dictionaries, comparisons, and what `map_location` takes. Raises
    `SyntaxError` and `ValueError`."""
    tree = ast.parse(source)
    left_out = {id(each) for node in ast.walk(tree) for each in find_others(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in left_out:
            name = str(node.value)
            if re.fullmatch(r"cuda:\d+", name):
                yield node.lineno, name


def find_others(node: ast.AST) -> Iterator[ast.AST]:
    """What names a GPU and moves nothing there, or on one rank only."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) if OF_ONE_RANK.search(ast.unparse(test)):
            yield from ast.walk(node)
        case ast.Subscript(slice=chosen) if OF_ONE_RANK.search(ast.unparse(chosen)):
            yield from ast.walk(node)
        case ast.Compare() | ast.keyword(arg="map_location"):
            yield from ast.walk(node)
        case ast.Dict(keys=keys):
            yield from filter(None, keys)
