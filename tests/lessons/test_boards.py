"""Each board stands alone: it reads like a program of the tutorial's, and runs where there is torch
alone."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from boards import BOARDS, source_of

from playground.base.remote import ROOT
from playground.lessons import PARTS
from playground.lessons.lesson_row import Lesson

LIBRARIES = {"torch", "torchvision", *sys.stdlib_module_names}
GIVEN = {f"playground.lessons.{name}" for name in ("devices", "gpt", "mnist")}
"""Models and data, which lessons that are programs are given."""


def folders(lessons: Sequence[Lesson]) -> list[str]:
    return [Path(each.path).name for each in lessons]


@cache
def tree_of(lesson: str) -> ast.Module:
    return ast.parse(source_of(lesson))


def imported(lesson: str) -> Iterator[str]:
    for node in ast.walk(tree_of(lesson)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize("lesson", BOARDS)
def test_a_board_imports_torch_and_earlier_boards_alone(lesson: str) -> None:
    """Those before it on the path; a board beside the path, all of the path, and those before it in
    its own part."""
    path, *beside = PARTS.values()
    read = next(
        [*before, *part]
        for before, part in (([], path), *((path, each) for each in beside))
        if lesson in folders(part)
    )
    earlier = folders(read)[: folders(read).index(lesson)]
    boards = {f"playground.lessons.{name}.lesson" for name in earlier} | GIVEN
    assert {name for name in imported(lesson) if name.split(".")[0] not in LIBRARIES} <= boards
    assert not {*imported(lesson)} & {"fcntl", "pty", "pwd", "resource", "termios"}, "not elsewhere"


def length(function: ast.FunctionDef) -> int:
    """Its lines, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return int(function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("lesson", BOARDS)
def test_functions_of_a_board_are_short(lesson: str) -> None:
    functions = [node for node in ast.walk(tree_of(lesson)) if isinstance(node, ast.FunctionDef)]
    assert {node.name: length(node) for node in functions if length(node) > 34} == {}


@pytest.mark.parametrize("lesson", BOARDS)
def test_a_line_changes_one_attribute(lesson: str) -> None:
    squeezed = [
        ast.unparse(node)
        for node in ast.walk(tree_of(lesson))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and any(isinstance(target, ast.Attribute) for target in node.targets[0].elts)
    ]
    assert squeezed == []


@pytest.mark.parametrize("lesson", BOARDS)
def test_a_board_ends_in_a_short_main(lesson: str) -> None:
    end = tree_of(lesson).body[-1]
    assert isinstance(end, ast.If)
    assert ast.unparse(end.test) == "__name__ == '__main__'"
    assert int(end.end_lineno or 0) - end.lineno <= 11


@pytest.fixture(scope="module")
def boards_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of each board, and no other file of the playground."""
    folder = tmp_path_factory.mktemp("alone")
    for lesson in BOARDS:
        copy = folder / "playground" / "lessons" / lesson / "lesson.py"
        copy.parent.mkdir(parents=True)
        copy.write_text(source_of(lesson), encoding="utf-8")
    for name in GIVEN:
        file = Path(*name.split(".")).with_suffix(".py")
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / file, folder / file)
    return folder


def run_alone(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )


def test_boards_are_imported_where_nothing_else_of_ours_is(boards_alone: Path) -> None:
    program = f"""
import importlib, os, sys
import torch.distributed.pipelining  # which sets a variable of torch's compiler
path, patched = list(sys.path), dict(os.environ)
for lesson in {BOARDS}:
    module = importlib.import_module(f"playground.lessons.{{lesson}}.lesson")
    assert module.__file__.startswith({str(boards_alone)!r}), module.__file__
assert (path, patched) == (sys.path, dict(os.environ))
"""
    done = run_alone(boards_alone, sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
