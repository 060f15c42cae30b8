"""The house: who may import whom, and what stays out of whose room."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import playground
from playground.cli import options, recipe
from playground.lessons import PATH, about, module_of
from playground.training.data import LOADERS
from playground.training.gradients import ALL_REDUCES
from playground.training.rungs import RUNGS

ROOT = Path(playground.__file__).parent
MODULES = {".".join(["playground", *file.relative_to(ROOT).with_suffix("").parts]): file for file in ROOT.rglob("*.py")}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


ALLOWED = {
    "runtime": {"runtime"},
    "algorithms": {"algorithms", "runtime"},
    "training": {"training", "algorithms", "runtime"},
    "measure": {"measure", "algorithms", "runtime"},
    "data_parallel": {"data_parallel", "runtime"},
    "lab": {"lab", "training", "measure", "algorithms", "runtime"},
    "lessons": {"runtime", "training", "algorithms", "data_parallel", "measure", "lab"},
    "show": {"show", "runtime"},
    "testing": {"runtime"},
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stay_within_bounds(module: str) -> None:
    imported = imports(MODULES[module])
    ours = {room(name) for name in imported if name.startswith("playground.")} - {""}
    if room(module) in ALLOWED:
        assert ours <= ALLOWED[room(module)]
    if module != "playground.__main__" and room(module) != "cli":
        assert "cli" not in ours
    if room(module) not in ("cli", "show"):
        assert "click" not in imported
    processes = {name for name in imported if name.startswith(("multiprocessing", "torch.multiprocessing"))}
    if module != "playground.runtime.server":  # which alone makes processes; others may talk to them
        assert all(name.startswith("multiprocessing.connection") for name in processes)


@pytest.mark.parametrize("module", sorted(name for name in MODULES if "runtime.backends" not in name))
def test_no_backend_is_compared_by_name(module: str) -> None:
    """What depends on the backend is asked of it."""
    names = {"gloo", "nccl"}
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Compare, ast.Match)):
            assert not names & {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_world_creates_and_destroys_groups(module: str) -> None:
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if module != "playground.runtime.world":
        assert not called & {"init_process_group", "destroy_process_group"}


@pytest.mark.parametrize("statement", ["import playground", "import playground.cli", "import playground.testing"])
def test_torch_is_not_imported_before_it_is_needed(statement: str) -> None:
    text = f"{statement}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)


@pytest.mark.parametrize("lesson", PATH, ids=lambda lesson: lesson.name)
def test_the_path_agrees_with_its_modules(lesson: playground.lessons.Lesson) -> None:
    module = importlib.import_module(f"playground.lessons.{module_of(lesson.name)}")
    texts = about(lesson.name)
    assert f"python -m playground {lesson.name}" in texts[""]
    for step in lesson.steps:
        assert callable(getattr(module, step))
        assert texts[step]


def test_the_command_line_offers_every_way_of_averaging() -> None:
    assert tuple(RUNGS) == recipe.RUNGS
    assert tuple(LOADERS) == recipe.LOADERS
    assert tuple(ALL_REDUCES) == options.ALL_REDUCES


SWAP = ("sgd", "ddp")


def test_the_step_from_sgd_to_ddp_is_two_lines() -> None:
    sgd, ddp = (MODULES[f"playground.lessons.{name}"].read_text().split("def run")[1].splitlines() for name in SWAP)
    assert len(sgd) == len(ddp)
    changed = [(a.strip(), b.strip()) for a, b in zip(sgd, ddp, strict=True) if a != b]
    assert len(changed) == 2
    assert changed[0] == ("broadcast_parameters(model)", "model = DistributedDataParallel(model)")
    assert changed[1][0].replace(", sync=synchronised(model, settings)", "") == changed[1][1]
