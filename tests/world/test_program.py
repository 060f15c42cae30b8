"""Where a program lies, what its ranks import once for all, and what cannot be run. (How it runs:
tests/tools/test_run.py.)"""

from __future__ import annotations
import __future__

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from playground.base.errors import UsageError
from playground.base.remote import ROOT, file_of
from playground.lessons import LESSONS
from playground.world.program import (
    COMPILER,
    Program,
    find_lessons,
    find_shared_imports,
    parse_program,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a script, a package with a `__main__.py`, a link and an archive."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    for package in ("tool", "tool/inner"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "tool" / "__main__.py").touch()
    (tmp_path / "tool" / "part.py").touch()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "run.py").symlink_to(tmp_path / "train.py")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "is_module", "file", "first"),
    [
        ("train.py", False, "train.py", ""),
        ("links/run.py", False, "links/run.py", ""),  # Python follows the link
        ("tool", False, "tool/__main__.py", "tool"),
        ("all.zip", False, None, "all.zip"),
        ("train", True, "train.py", ""),
        ("tool", True, "tool/__main__.py", ""),
        ("tool.part", True, "tool/part.py", ""),
        ("tool.inner", True, None, ""),  # which has no __main__.py
        ("tool.nothing", True, None, ""),
    ],
)
def test_a_program_is_found_without_importing_it(
    name: str, is_module: bool, file: str | None, first: str, folder: Path
) -> None:
    program = Program(name=name, is_module=is_module, arguments=("--epochs", "2"))
    found = program.locate()
    assert found == (None if file is None else Path(found or "").parent / Path(file).name)
    assert found is None or os.path.realpath(found) == os.path.realpath(folder / str(file))
    assert program.first_folders == [os.path.realpath(folder / first)]
    assert program.words == [*["-m"] * is_module, name, "--epochs", "2"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(name="no.py"), r"run no\.py: there is no such file, in /"),
        (Program(name="no_such.part", is_module=True), "there is no module no_such on sys.path"),
    ],
)
def test_a_program_that_is_not_there_is_refused(program: Program, words: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=words):
        program.locate()


def test_a_program_is_compiled_as_its_file_says_and_not_as_ours_do(folder: Path) -> None:
    code = Program(name="train.py").compile(str(folder / "train.py"))
    assert not code.co_flags & __future__.annotations.compiler_flag


ASK_FOR_PATH = """
import os, sys
from playground.world.program import path_of_new_interpreter
sys.path[:] = [os.getcwd(), "/lib", os.getcwd()]
print(path_of_new_interpreter())
"""


@pytest.mark.parametrize(
    ("option", "is_ours", "kept"),
    [
        ("-u", False, ["{here}", "/lib"]),  # the last is that of `python -m playground`
        ("-u", True, ["{here}", "/lib", "{here}"]),
        ("-P", False, ["{here}", "/lib", "{here}"]),  # Python has not put it there
    ],
)
def test_a_program_does_not_look_for_modules_in_the_folder_of_this_command(
    option: str, is_ours: bool, kept: list[str], tmp_path: Path
) -> None:
    here = ROOT if is_ours else tmp_path
    words = [sys.executable, option, "-c", ASK_FOR_PATH]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=here, env=environ, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == tuple(each.format(here=here) for each in kept)


@pytest.mark.parametrize("content", [b"if:\n", b"\x00", b"\xff = 1", b"x = '"])
def test_what_is_no_script_is_refused_in_a_line(content: bytes, folder: Path) -> None:
    (folder / "broken.py").write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.py") as raised:
        parse_program(folder / "broken.py")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "shared"),
    [
        ("import os, torch.nn as nn", ["torch.nn"]),
        ("from torchvision.datasets import MNIST", ["torchvision.datasets"]),
        ("from . import torch\nfrom .torch import nn\nimport mine", []),
        ("def f():\n    import numpy", ["numpy"]),
        ("from torch.nn.parallel import DistributedDataParallel as DDP",
         ["torch.nn.parallel", COMPILER[0]]),
        ("import torch\nstep = torch.compile(step)", ["torch", *COMPILER]),
        ("import torch\ntorch.optim.SGD([tensor])", ["torch", COMPILER[0]]),
        ("from torch import optim", ["torch", COMPILER[0]]),
        ("from torch.optim import SGD", ["torch.optim", COMPILER[0]]),
        ("import torch.optim as optimizers", ["torch.optim", COMPILER[0]]),
    ],
)  # fmt: skip
def test_only_what_reads_nothing_of_a_rank_is_imported_once_for_all(
    source: str, shared: list[str]
) -> None:
    assert [*find_shared_imports(ast.parse(source))] == shared


def test_what_a_program_is_composed_of_is_imported_once_for_all_too() -> None:
    """mesh is composed of earlier lessons."""
    source = "import torch\nimport playground.lessons.zero.lesson as zero, playground.launch"
    assert [*find_lessons(ast.parse(source))] == [file_of(LESSONS["zero"].module)]
    composed = find_lessons(parse_program(file_of(LESSONS["mesh"].module)))
    shared = {name for file in composed for name in find_shared_imports(parse_program(file))}
    assert {"torch.distributed.fsdp", "torch.distributed.pipelining"} <= shared
