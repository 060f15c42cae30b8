"""remote("package.module:function"): a function named without importing its module.

A command line that starts ranks does without torch, which takes seconds to import: it names what the ranks are to run,
and they import it. The name is checked where it is written, not where it is used.
"""

from __future__ import annotations

import ast
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The folder that the package lies in."""


@dataclass(frozen=True)
class Remote:
    """A function at the top of one of our modules. Called like the function itself, it imports the module first."""

    module: str
    name: str

    def load(self) -> Any:
        """The function (or whatever else has that name)."""
        return getattr(importlib.import_module(self.module), self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, in one line."""
        return docstrings(self.module).get(self.name, "")


def remote(reference: str) -> Remote:
    """The function that `reference` ("package.module:function") names. Raises `ValueError` if there is none."""
    module, _, name = reference.partition(":")
    try:
        names = top_level_names(module)
    except OSError:
        raise ValueError(f"{reference}: there is no module {module}") from None
    if name not in names:
        raise ValueError(f"{reference}: {module} has nothing called {name!r} at its top")
    return Remote(module, name)


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def module_exists(module: str) -> bool:
    return file_of(module).is_file()


@functools.cache
def parse(module: str) -> ast.Module:
    """The source of one of our modules, parsed but not run."""
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


@functools.cache
def docstrings(module: str) -> dict[str, str]:
    """What a module says about itself (under "") and, in one paragraph each, about its functions and classes."""
    tree = parse(module)
    texts = {"": ast.get_docstring(tree) or ""}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            texts[node.name] = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return texts


def rank_functions(module: str) -> tuple[str, ...]:
    """The module's functions that ranks run, in order: those whose first two parameters are `rank` and `size`."""
    functions = (node for node in parse(module).body if isinstance(node, ast.FunctionDef))
    return tuple(each.name for each in functions if [arg.arg for arg in each.args.args[:2]] == ["rank", "size"])


def top_level_names(module: str) -> set[str]:
    names = set()
    for node in parse(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
