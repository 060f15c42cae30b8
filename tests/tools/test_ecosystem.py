"""Programs as others write them, with what the ecosystem has for them, and some of its own: each
ends under `run` as under torchrun, with the same exit code, lines and files."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import ENOUGH

from playground.site.texts import CHAPTERS

FOLDER = Path(__file__).parent / "ecosystem"
CHAPTER = CHAPTERS["run"]
EXTRA = {"accelerate", "lightning", "torchmetrics", "transformers"}
"""Packages that pyproject.toml has under `ecosystem`, with what they need."""
TORCHRUN = "torch.distributed.run"
ABORTED = "terminate called without an active exception"
"""What the C++ library says where a thread is still there when torch's objects are taken down at a
rank's end. It happens to a right program now and then, on a busy machine, whoever started it: it is
started again. So is torchrun where the ranks of a restart have not met."""
STARTS = 5


@dataclass(frozen=True)
class Case:
    program: str
    """A file of the folder `ecosystem`, or a module."""
    size: int = 2
    words: tuple[str, ...] = ()
    restarts: int = 0
    code: int = 0

    def __str__(self) -> str:
        return f"{self.program} {self.size}"

    @property
    def target(self) -> list[str]:
        file = FOLDER / f"{self.program}.py"
        return [str(file)] if file.is_file() else ["-m", self.program]

    @property
    def missing(self) -> set[str]:
        """Packages that it needs and that are not installed."""
        *_, file = self.target
        text = Path(file).read_text() if file != self.program else f"import {self.program}"
        needed = EXTRA & {*re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}
        return {each for each in needed if not importlib.util.find_spec(each)}


ACCELERATES = "accelerate.test_utils.scripts.test_"
OTHERWISE = [
    Case("hsdp", size=4),
    Case("mesh", size=4),
    Case("ends", words=("--lr", "0.5", "a", "b c")),
    Case("package.train", words=("--epochs", "2")),
    Case("restarts", restarts=1),
    Case("fails", code=1),
    *(Case(f"{ACCELERATES}{name}") for name in ("cli", "ops", "sync", "script")),
]
FILES = {file.stem for file in FOLDER.glob("*.py")} - {"common"}
CASES = [
    *map(Case, sorted(FILES - {case.program for case in OTHERWISE})),
    *OTHERWISE,
    *(Case(name, size=3) for name in ("checkpoint", "collectives", "ddp_options", "fsdp2")),
    *(Case(name, size=3) for name in ("groups", "objects", "pipelining", "zero")),
]


def outcome(case: Case, folder: Path, launcher: list[str]) -> tuple[list[str], list[str]]:
    """The lines on stdout of a program that ends under this launcher with its exit code, and the
    files it has written.

    Ranks of torchrun share a pipe, and `print("a", "b")` is several writes to it, which those of
    another rank may come between. So torchrun writes a file for each rank; `run` keeps lines whole.
    """
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    # without a GPU, accelerate.Accelerator forms a process group only if it is asked to
    environ["ACCELERATE_USE_CPU"] = "true"
    for attempt in range(STARTS):
        here = folder / str(attempt)
        here.mkdir(parents=True)
        logs = folder / f"logs{attempt}"
        to_files = ["--log-dir", str(logs), "--redirects", "1"] if launcher[0] == TORCHRUN else []
        ran = subprocess.run(
            [sys.executable, "-m", *launcher, *to_files, *case.target, *case.words], cwd=here,
            capture_output=True, text=True, timeout=10 * ENOUGH, env=os.environ | environ,
            check=False,
        )  # fmt: skip
        not_met = launcher[0] == TORCHRUN and ran.returncode != case.code
        if ABORTED not in ran.stderr and not not_met:
            break
    assert ran.returncode == case.code, ran.stderr
    files = sorted(str(file.relative_to(here)) for file in here.rglob("*"))
    printed = "".join(file.read_text() for file in sorted(logs.rglob("stdout.log")))
    return sorted((ran.stdout + printed).splitlines()), files


@pytest.mark.stress
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_program_ends_as_under_torchrun(case: Case, tmp_path: Path) -> None:
    if case.missing:
        pytest.skip(f"{', '.join(case.missing)} not installed: pip install -e .[ecosystem]")
    size, restarts = str(case.size), str(case.restarts)
    ours = ["playground", "run", "-n", size, "--restarts", restarts]
    # with another rendezvous the ranks of a restart find addresses of those before
    torchruns = [TORCHRUN, "--standalone", "--nproc-per-node", size]
    torchruns += ["--max-restarts", restarts]
    found = outcome(case, tmp_path / "ours", ours)
    assert found == outcome(case, tmp_path / "torchruns", torchruns)
    assert found[0]


@pytest.mark.stress
@pytest.mark.parametrize("name", sorted(FILES - {case.program for case in OTHERWISE})[:25])
def test_options_leave_a_program_as_it_is(name: str, tmp_path: Path) -> None:
    """Programs as others write them, whatever they do: a constant is set, and nothing else changes
    in what they print, also where the run is measured, recorded, and its link is a slow one. A
    process that a rank spawns imports the file as `__mp_main__`, and finds what is written there.
    """
    case = Case(name)
    if case.missing:
        pytest.skip(f"{', '.join(case.missing)} not installed: pip install -e .[ecosystem]")
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    imports = ast.Import | ast.ImportFrom
    [*_, last] = (node for node in ast.parse(text).body if isinstance(node, imports))
    lines = text.splitlines(keepends=True)
    lines.insert(last.end_lineno or 0, "SET = 1\nprint(f'{__name__} SET is {SET}\\n', end='')\n")
    (tmp_path / f"{name}.py").write_text("".join(lines), encoding="utf-8")
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])

    def run(*words: str) -> list[str]:
        for _ in range(STARTS):
            ran = subprocess.run(
                [sys.executable, "-m", "playground", "run", *words, f"{name}.py"], cwd=tmp_path,
                capture_output=True, text=True, timeout=10 * ENOUGH, check=False,
                env=os.environ | {"BACKEND": "gloo", "PYTHONPATH": path},
            )  # fmt: skip
            if ABORTED not in ran.stderr:
                break
        assert ran.returncode == 0, ran.stderr
        return sorted(ran.stdout.splitlines())

    without, changed = run(), run("--set", "SET=2")
    before, after = "__main__ SET is 1", "__main__ SET is 2"
    assert changed == sorted(line.replace(before, after) for line in without)
    assert changed.count(after) == case.size
    assert run("--profile", "cost.json", "--link", "10", "--see", "run.html") == without
    assert {"cost.json", "run.html"} < {file.name for file in tmp_path.iterdir()}


def test_the_chapter_says_how_many_they_are() -> None:
    assert f"{len({*CASES})} programs" in CHAPTER.read_text(encoding="utf-8")
