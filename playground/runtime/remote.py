"""remote("package.module:function"): a function named without importing its module.

A command line that starts ranks does without torch, which takes seconds to import: it names what the ranks are to run,
and they import it. The name is checked where it is written, not where it is used.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.runtime.errors import UsageError

ROOT = Path(__file__).parents[2]
"""The folder that the package lies in."""


@dataclass(frozen=True)
class Remote:
    """A function at the top of one of our modules. Called like the function itself, it imports the module first."""

    module: str
    name: str

    def load(self) -> Any:
        """The function (or whatever else has that name). Raises `UsageError` for a syntax error on the way to it."""
        with syntax_errors_in_one_line():
            return getattr(importlib.import_module(self.module), self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, in one line."""
        return outline(self.module).docstrings.get(self.name, "")


def remote(reference: str) -> Remote:
    """The function that `reference` ("package.module:function") names. Raises `ValueError` if there is none."""
    module, _, name = reference.partition(":")
    try:
        source = file_of(module).read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"{reference}: there is no module {module}") from None
    # Not by its outline: ranks make these references too, and a syntax tree leaves megabytes of garbage in each.
    if not name or not re.search(rf"^(?:def|class) {name}\b|^{name}\b[^=\n]*=", source, re.MULTILINE):
        raise ValueError(f"{reference}: {module} has nothing called {name!r} at its top")
    return Remote(module, name)


@contextlib.contextmanager
def syntax_errors_in_one_line() -> Iterator[None]:
    """Raise `UsageError`, which names the file and the line, instead of `SyntaxError`."""
    try:
        yield
    except SyntaxError as error:
        raise UsageError(f"{error.filename}, line {error.lineno}: {error.msg}; correct it and retry") from error


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def module_exists(module: str) -> bool:
    return file_of(module).is_file()


@dataclass(frozen=True)
class Outline:
    """The docstrings and functions of a module, known without running it."""

    docstrings: dict[str, str]
    """Its docstring (under "") and the first paragraphs of those of its functions and classes."""
    rank_functions: tuple[str, ...]
    """Functions that ranks run, in order: those whose first two parameters are `rank` and `size`, unless they are given
    another one to run (`fn`)."""


@functools.cache
def outline(module: str) -> Outline:
    """The outline of one of our modules. Raises `OSError` if there is none of that name, and `UsageError` for one that
    is not valid Python."""
    file = file_of(module)
    with syntax_errors_in_one_line():
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    texts = {"": ast.get_docstring(tree) or ""}
    rank_functions = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            texts[node.name] = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if isinstance(node, ast.FunctionDef):
            rank, size, *others = *(arg.arg for arg in node.args.args), "", ""
            if (rank, size) == ("rank", "size") and "fn" not in others:
                rank_functions.append(node.name)
    return Outline(texts, tuple(rank_functions))
