"""The house: what stays out of whose room, and that every table leads somewhere. `lint-imports`
holds who may import whom."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import boards
import pytest

import playground
from playground.algorithms import ALGORITHMS
from playground.app import TOOLS
from playground.base.remote import Remote, remote
from playground.lessons import ROWS
from playground.lessons.lesson_row import Lesson
from playground.training.grad_syncs import GRAD_SYNCS

ROOT = Path(playground.__file__).parent
MODULES = {
    ".".join(["playground", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): file
    for file in ROOT.rglob("*.py")
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return [*ast.walk(tree_of(module))]


@cache
def imports(module: str) -> set[str]:
    """What a module imports, wherever in it: at its top, in a function, for a type checker; and
    whether it is a name or a module: both are there."""
    found = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module} imports relatively"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def named(module: str) -> set[str]:
    """Our modules that its strings name: "playground.room.module:function", as `remote` takes them,
    or a path."""
    strings = (
        node.value
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    found = (name for string in strings for name in re.findall(r"^playground(?:[./]\w+)+", string))
    return {name.replace("/", ".") for name in found}


BOARDS = {f"playground.lessons.{name}.lesson" for name in boards.BOARDS}
PROGRAMS = {lesson.module for lesson in ROWS}
MAKE_PROCESSES = {
    "playground.world.launcher.forked_process",
    "playground.base.upstream",
}


def add_module(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that consists of this: another one in each folder, as
    what is known of a module is kept."""
    file = folder / "guarded.py"
    file.write_text(source)
    module = f"playground.world.{folder.name}"
    monkeypatch.setitem(MODULES, module, file)
    return module


LAYERS = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"][0]["layers"]
"""The rooms, from above, as `lint-imports` holds them."""


def layer_of(module: str) -> int:
    """Counted from above; of what no layer has, that of the ground."""
    for number, layer in enumerate(LAYERS):
        for name in re.split(r" [:|] ", layer):
            if f"{module}.".startswith(f"{name}."):
                return number
    return len(LAYERS)


def test_modules_that_strings_name_are_not_above() -> None:
    """`remote("package.module:function")` imports a module when it is called."""
    assert {
        (module, name)
        for module in MODULES
        for name in named(module)
        if layer_of(name) < layer_of(module) < len(LAYERS)
    } == set()


def test_the_page_of_the_rooms_is_true() -> None:
    """playground/README.md has every room, above all that it imports."""
    page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A lesson")[0]
    told = re.findall(r"^\| `(\w+(?:/\w+)?)/` \|", page, re.M)
    assert {file.parent.name for file in ROOT.glob("*/__init__.py")} == {
        name.partition("/")[0] for name in told
    }
    layers = [layer_of(f"playground.{name.replace('/', '.')}") for name in told]
    assert layers == sorted(layers)


def test_processes_are_made_in_one_place() -> None:
    """Others may talk to them."""
    making = {
        module
        for module in MODULES
        for name in imports(module)
        if name.startswith(("multiprocessing", "torch.multiprocessing"))
        and not name.startswith("multiprocessing.connection")
    }
    assert making == MAKE_PROCESSES


def test_of_a_tool_only_its_command_speaks_to_the_terminal() -> None:
    speaking = ("page", "command", "report", "options", "start")
    assert {
        module
        for module in MODULES
        if module.startswith("playground.tools.")
        and module.rpartition(".")[2] not in speaking
        and "click" in imports(module)
    } == set()


def test_options_are_declared_as_flags() -> None:
    """But for those of programs: of constants, and one that has a parser of its own."""
    by_hand = {name for name, file in MODULES.items() if "click.option(" in file.read_text("utf-8")}
    assert by_hand == {"playground.ui.options", "playground.tools.run.options"}


def test_of_what_looks_at_runs_only_the_command_and_the_option_speak_to_the_terminal() -> None:
    speaking = {
        name
        for name in MODULES
        if name.startswith(("playground.explain.replay", "playground.figures"))
        and "click" in imports(name)
    }
    assert speaking == {"playground.figures.command", "playground.explain.replay.see"}


def compares_backends(module: str) -> bool:
    compared = (node for node in nodes_of(module) if isinstance(node, (ast.Compare, ast.Match)))
    constants = (
        part.value for node in compared for part in ast.walk(node) if isinstance(part, ast.Constant)
    )
    return any(constant in ("gloo", "nccl") for constant in constants)


def test_no_backend_is_compared_by_name() -> None:
    """What depends on the backend is asked of it, but by programs, which run without us."""
    comparing = {name for name in MODULES if compares_backends(name)} - PROGRAMS
    assert {name for name in comparing if "world.backends" not in name} == set()


def called_methods(module: str) -> set[str]:
    return {
        node.func.attr
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def test_only_world_creates_and_destroys_groups() -> None:
    """And programs of lessons, as the tutorial does, a script for torchrun, and a judge whose world
    is on gloo: it destroys its group on nccl."""
    names = {"init_process_group", "destroy_process_group"}
    modules = {module for module in MODULES if names & called_methods(module)}
    assert modules - BOARDS == {
        "playground.exercises.gpus.judges",
        "playground.lessons.bert.multinli",
        "playground.lessons.context.ulysses",
        "playground.lessons.elastic.hosts",
        "playground.lessons.gpu_barrier",
        "playground.lessons.gpu_memory",
        "playground.lessons.gpu_ranks",
        "playground.lessons.gpu_streams",
        "playground.lessons.train_on_many",
        "playground.world.rank.member",
    }


def torch_names(module: str) -> set[str]:
    """What a module has imported from torch, torch itself among it."""
    names = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or "torch"
                for alias in node.names
                if alias.name.split(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def is_torchs(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is torch's, or an attribute of what is. (What is set in torch.backends
    is an option.)"""
    if ast.unparse(node).startswith("torch.backends."):
        return False
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def assigns_to_torch(module: str) -> Iterator[str]:
    """Assignments to attributes of torch's modules and classes, by whatever statement."""
    names = torch_names(module)
    for node in nodes_of(module):
        owner = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owner = node.args[0]
        if owner and is_torchs(owner, names):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.equal = print", ["torch.equal"]),
        ("import torch.distributed as dist\ndist.Work.wait: object = print", ["dist.Work.wait"]),
        (
            "from torch.distributed import Work as W\nsetattr(W, 'wait', 1)",
            ["setattr(W, 'wait', 1)"],
        ),
        ("import torch\ntorch.backends.cudnn.benchmark = False\nself.torch.x = 1", []),
    ],
)
def test_the_guard_sees_what_is_put_in_the_place_of_torchs(
    source: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*assigns_to_torch(add_module(source, tmp_path, monkeypatch))] == found


REPLACING = {
    "playground.tap.tap",  # observes torch.distributed, for the flight recorder too
    "playground.tap.inside",
    "playground.tap.training",
    # What changes the meaning, which no observer can:
    "playground.world.rank.program_groups",  # a program may form the world that it is in
    "playground.world.rank.debugger",  # no timeout ends the wait for a rank that is debugged
    "playground.exercises.calls",  # the judge refuses calls, and sends and receives copies
    "playground.exercises.hello.judges",  # the surroundings of a solution, in one case
    "playground.exercises.elastic.judges",
    # Not torch.distributed:
    "playground.exercises.gpus.judges",  # the judge notes which stream waits for an event
    "playground.explain.replay.record.training",  # calls of modules, and backward
}
"""Modules that have `tap.replacement` put a function in the place of another."""


def test_torchs_functions_are_replaced_in_one_place() -> None:
    """`tap.replacement` does it, for few."""
    assert {module: found for module in MODULES if (found := [*assigns_to_torch(module)])} == {}
    replacing = {
        module
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Replacement", "replaced")
    }
    assert replacing - {"playground.tap.replacement"} == REPLACING


def unchecked_names(module: str) -> Iterator[str]:
    """Strings that name one of our modules and are no argument of `remote`."""
    checked = {
        id(part)
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "remote"
        for part in ast.walk(node)
    }
    for node in nodes_of(module):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in checked
        ):
            if module == "playground.world.launcher.fork_client" and node.value.startswith(
                "playground.world."
            ):
                continue  # what every rank needs, loaded before there are any
            if re.fullmatch(r"playground(\.\w+)+(:\w+)?", node.value):
                yield node.value


def test_our_modules_are_named_in_strings_only_by_remote() -> None:
    assert {module: found for module in MODULES if (found := [*unchecked_names(module)])} == {}


def names_at_top(module: str) -> set[str]:
    """What a module defines or assigns."""
    nodes = tree_of(module).body
    assigned = (
        part
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for part in ast.walk(node)
    )
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | {
        part.id
        for part in assigned
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def test_every_name_that_remote_takes_is_there() -> None:
    strings = (
        node.value
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Constant)
    )
    references = {
        each
        for each in strings
        if isinstance(each, str) and re.fullmatch(r"playground(\.\w+)+:\w+", each)
    }
    assert [
        each for each in references if each.split(":")[1] not in names_at_top(each.split(":")[0])
    ] == []
    assert len(references) > 25


TABLES = [*GRAD_SYNCS.values(), *ALGORITHMS.values()]
"""What they name is put together: no string has it whole."""


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_what_a_table_names_is_there(spec: object) -> None:
    code = getattr(spec, "code", None)
    assert isinstance(code, Remote)
    assert callable(code.load())


def test_options_and_results_are_typed() -> None:
    """No result is a dictionary of anything, by whatever name: those that are left hold states of
    a program that is not ours, arguments that are handed on, and what a rank reports."""
    found = {
        name: re.findall(r"\b(?:dict|Mapping)\[str, Any\]", file.read_text(encoding="utf-8"))
        for name, file in MODULES.items()
    }
    assert sum(map(len, found.values())) <= 20


LAUNCHER = [
    "playground", "playground.app", "playground.testing", "playground.training.step_settings",
    *sorted(name for name in MODULES if name.endswith((".page", ".command", ".report"))),
]  # fmt: skip


def test_the_package_imports_names_and_does_nothing_else() -> None:
    """Importing it: a docstring, names for type checkers, and the functions that import each of
    them, and IPython's extension, when they are asked for."""
    _, checking, names, exported, getter, extension = tree_of("playground").body
    assert ast.unparse(checking) == "TYPE_CHECKING = False"
    assert isinstance(names, ast.If)
    assert isinstance(exported, ast.Assign)
    assert isinstance(getter, ast.FunctionDef)
    assert ast.unparse(names.test) == "TYPE_CHECKING"
    assert all(isinstance(each, ast.ImportFrom) for each in names.body)
    typed = {alias.name for each in names.body for alias in getattr(each, "names", [])}
    assert {*ast.literal_eval(exported.value)} == typed == {*playground.__all__}
    assert getter.name == "__getattr__"
    assert getter.decorator_list == []
    assert isinstance(extension, ast.FunctionDef)  # of IPython, which looks for this name
    assert extension.name == "load_ipython_extension"
    assert extension.decorator_list == []


def test_torch_is_not_imported_before_it_is_needed(
    torch_is_imported: Callable[..., list[str]],
) -> None:
    """Not by what parses a command line, nor by what reads the results of ranks."""
    assert torch_is_imported(*LAUNCHER, "playground.training.step") == ["playground.training.step"]


@pytest.mark.parametrize("lesson", ROWS, ids=lambda lesson: lesson.name)
def test_the_path_agrees_with_its_folders(lesson: Lesson) -> None:
    importlib.import_module(lesson.module)
    assert f"python -m playground {lesson.name}" in lesson.help
    assert (MODULES[lesson.module].parent / "README.md").is_file()


def test_every_tool_has_its_command() -> None:
    for name, tool in TOOLS.items():
        assert tool.command.load().name == name


@pytest.mark.parametrize(
    "reference",
    ["playground.no_such_module:f", "playground.world.rank.program_groups"],
)
def test_a_reference_to_nothing_is_refused_where_it_is_written(reference: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reference)):
        remote(reference)
