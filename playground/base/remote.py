"""remote("package.module:function"): a function named without importing its module.

A command line that starts ranks does without torch, which takes seconds to import: it names what
the ranks are to run, and they import it. A test looks up every name that is written so.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.base.errors import UsageError

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Remote:
    """A function at the top of one of our modules. Called like the function itself, it imports the
    module first."""

    module: str
    name: str

    def load(self) -> Any:
        """The function (or whatever else has that name). Raises `UsageError` for a syntax error on
        the way to it."""
        with syntax_errors_in_one_line():
            return getattr(importlib.import_module(self.module), self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, in one line."""
        return docstrings(self.module).get(self.name, "")


def remote(reference: str) -> Remote:
    """The function that `reference` ("package.module:function") names. Raises `ValueError` if there
    is no such module."""
    module, _, name = reference.partition(":")
    if not (name and module_exists(module)):
        raise ValueError(f"{reference}: use package.module:function, of one of our modules")
    return Remote(module, name)


@contextlib.contextmanager
def syntax_errors_in_one_line() -> Iterator[None]:
    """Raise `UsageError`, which names the file and the line, instead of `SyntaxError`."""
    try:
        yield
    except SyntaxError as error:
        raise UsageError(
            f"{error.filename}, line {error.lineno}: {error.msg}; correct it and retry"
        ) from error


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def module_exists(module: str) -> bool:
    return file_of(module).is_file()


@functools.cache
def parse_module(module: str) -> ast.Module:
    """The syntax tree of one of our modules. Raises `OSError` if there is none of that name, and
    `UsageError` for one that is not valid Python."""
    file = file_of(module)
    with syntax_errors_in_one_line():
        return ast.parse(file.read_text(encoding="utf-8"), str(file))


def docstrings(module: str) -> dict[str, str]:
    """Its docstring (under "") and the first paragraphs of those of its functions and classes."""
    tree = parse_module(module)
    return {"": ast.get_docstring(tree) or ""} | {
        node.name: " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
