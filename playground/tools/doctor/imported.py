"""The training that a script imports from a file beside it: that file is the one to examine. Does
not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from playground.tools.doctor.data_parallel.plan import (
    is_of_one_process,
    read_script,
    tells_of_processes,
)


def find_imported_training(script: Path) -> Path | None:
    """The file beside a script that trains in one process, and that the script imports, or a file
    that it imports. None if the script trains itself, or tells of several processes."""
    waiting, known = [script], {script}
    for path in waiting:
        text = read_script(path)
        if text is None:
            continue
        if path != script and is_of_one_process(text, path):
            return path
        if text.find_calls("backward") or tells_of_processes(text.source):
            continue
        new = [each for each in files_of_imports(text.tree, path.parent) if each not in known]
        waiting += new
        known |= {*new}
    return None


def files_of_imports(tree: ast.AST, folder: Path) -> Iterator[Path]:
    """The files in a folder, and below it, that a text imports."""
    for node in ast.walk(tree):
        names = [each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{name}".strip(".") for name in names)]
        for name in filter(None, names):
            place = folder.joinpath(*name.split("."))
            found = (place.with_suffix(".py"), place / "__init__.py")
            yield from (each for each in found if each.is_file())
