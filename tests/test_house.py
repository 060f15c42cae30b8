"""The house: who may import whom, what stays out of whose room, and that every table leads somewhere."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import playground
from playground.algorithms import ALGORITHMS
from playground.console.lesson import Lesson
from playground.lessons import PATH
from playground.runtime.remote import Remote, remote
from playground.tools import TOOLS
from playground.training.grad_syncs import GRAD_SYNCS

ROOT = Path(playground.__file__).parent
MODULES = {
    ".".join(["playground", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): file
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
    """What a module imports, wherever in it, and whether it is a name or a module: both are there."""
    found = set()
    for node in nodes_of(module):
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
    "measurement": {"measurement", "runtime"},
    "remote": {"remote", "runtime"},
    "analysis": {"analysis", "recording", "algorithms"},
    "figures": {
        "figures",
        "player",
        "analysis",
        "recording",
        "lessons",
        "training",
        "algorithms",
        "measurement",
        "runtime",
    },
    "player": {"player", "figures", "analysis", "recording", "runtime"},
    "recording": {"recording", "training", "algorithms", "remote", "runtime"},
    "console": {"console", "recording", "figures", "training", "algorithms", "runtime"},
    "lessons": {"lessons", "console", "training", "algorithms", "measurement", "remote", "runtime"},
    "tools": {
        "tools",
        "console",
        "training",
        "algorithms",
        "measurement",
        "recording",
        "analysis",
        "figures",
        "player",
        "runtime",
    },
    "testing": {"testing", "runtime"},
    "": {"runtime", "console"},
    "__main__": {"app"},
}
"""Lower rooms first: nothing below imports what is above it, and nobody but the program's entry imports `app`."""

MAKE_PROCESSES = {
    *(f"playground.runtime.{name}" for name in ("server", "fork_client", "fork_server")), "playground.training.loader"
}  # fmt: skip


def out_of_bounds(module: str) -> set[str]:
    """What this module imports and must not."""
    imported = imports(module)
    ours = {name for name in imported if name.startswith("playground.") and room(name)}
    wrong = {name for name in ours if room(name) not in ALLOWED[room(module)]} if room(module) in ALLOWED else set()
    processes = {name for name in imported if name.startswith(("multiprocessing", "torch.multiprocessing"))}
    if module not in MAKE_PROCESSES:  # others may talk to them
        wrong |= {name for name in processes if not name.startswith("multiprocessing.connection")}
    return wrong


def test_imports_stay_within_bounds() -> None:
    assert {module: wrong for module in MODULES if (wrong := out_of_bounds(module))} == {}


FOLDERS = sorted({module.rsplit(".", 1)[0] for module in MODULES if re.search(r"\.(lessons|tools)\.\w+\.", module)})


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_lesson_or_tool_keeps_to_itself(folder: str) -> None:
    """A lesson may import an earlier one, where it teaches the difference; its command and report import no lesson."""
    names = [lesson.module().removesuffix(".lesson") for lesson in PATH]
    earlier = names[: names.index(folder)] if folder in names else []
    for module in (name for name in MODULES if name.startswith(f"{folder}.")):
        part = module.removeprefix(f"{folder}.")
        others = {name for name in imports(module) if re.match(r"playground\.(lessons|tools)\.\w+", name)}
        others = {name for name in others if not f"{name}.".startswith(f"{folder}.")} - {
            "playground.lessons.LESSONS", "playground.lessons.PATH", "playground.tools.TOOLS",
        }  # fmt: skip
        if part in ("page", "command", "report"):
            assert not others
        assert all(any(name.startswith(each) for each in earlier) for name in others), others
        if part not in ("page", "command", "report", "options"):
            assert "click" not in imports(module)


def test_there_are_no_circles() -> None:
    graph = {module: {name for name in at_import(module) if name in MODULES} - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"{' → '.join([*way, module])}"
        if module not in done:
            for name in graph[module]:
                visit(name, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def at_import(module: str) -> Iterator[str]:
    """What is imported when the module is: not what a function imports later, or a type checker reads."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            names = {alias.name for alias in node.names}
            yield from submodules
            if len(submodules) < len(names):
                yield node.module


def compares_backends(module: str) -> bool:
    compared = (node for node in nodes_of(module) if isinstance(node, (ast.Compare, ast.Match)))
    constants = (part.value for node in compared for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(constant in ("gloo", "nccl") for constant in constants)


def test_no_backend_is_compared_by_name() -> None:
    """What depends on the backend is asked of it."""
    assert [name for name in MODULES if "runtime.backends" not in name and compares_backends(name)] == []


def called_methods(module: str) -> set[str]:
    return {
        node.func.attr
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def test_only_world_creates_and_destroys_groups() -> None:
    names = {"init_process_group", "destroy_process_group"}
    assert [module for module in MODULES if names & called_methods(module)] == ["playground.runtime.world"]


def unchecked_names(module: str) -> Iterator[str]:
    """Strings that name one of our modules and are no argument of `remote`."""
    checked = {
        id(part)
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "remote"
        for part in ast.walk(node)
    }
    for node in nodes_of(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in checked:
            if module == "playground.runtime.server" and node.value.startswith("playground.runtime."):
                continue  # what every rank needs, loaded before there are any
            if re.fullmatch(r"playground(\.\w+)+(:\w+)?", node.value):
                yield node.value


def test_our_modules_are_named_in_strings_only_by_remote() -> None:
    """A name in a string is checked where it is written, by `remote`, or not at all."""
    assert {module: found for module in MODULES if (found := [*unchecked_names(module)])} == {}


def test_options_and_results_are_typed() -> None:
    """Dictionaries of anything are few: where an event of a rank travels, where a command hands options on."""
    count = sum(file.read_text(encoding="utf-8").count("dict[str, Any]") for file in MODULES.values())
    assert count <= 10


LAUNCHER = [
    "playground", "playground.app", "playground.testing", "playground.training.settings", "playground.training.results",
    *sorted(name for name in MODULES if name.endswith((".page", ".command", ".report"))),
]  # fmt: skip


def test_torch_is_not_imported_before_it_is_needed(torch_is_imported: Callable[..., list[str]]) -> None:
    """Not by what parses a command line, nor by what reads the results of ranks."""
    assert torch_is_imported(*LAUNCHER, "playground.training.loop") == ["playground.training.loop"]


@pytest.mark.parametrize("lesson", PATH, ids=lambda lesson: lesson.name)
def test_the_path_agrees_with_its_folders(lesson: Lesson) -> None:
    module = importlib.import_module(lesson.module())
    assert f"python -m playground {lesson.name}" in lesson.texts[""]
    for step in lesson.steps:
        assert callable(getattr(module, step))
        assert lesson.texts[step]
    assert (MODULES[lesson.module()].parent / "README.md").is_file()


TABLES = [*GRAD_SYNCS.values(), *ALGORITHMS.values()]


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_what_a_table_names_is_there(spec: object) -> None:
    code = getattr(spec, "code", None)
    assert isinstance(code, Remote)
    assert callable(code.load())


def test_every_tool_has_its_command() -> None:
    for name, tool in TOOLS.items():
        assert tool.command.load().name == name


@pytest.mark.parametrize(
    "reference",
    ["playground.no_such_module:f", "playground.runtime.world:no_such_function", "playground.runtime.world"],
)
def test_a_reference_to_nothing_is_refused_where_it_is_written(reference: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reference)):
        remote(reference)


@pytest.mark.parametrize("lesson", PATH, ids=lambda lesson: lesson.name)
def test_a_lesson_run_as_a_script_is_its_own_command(lesson: Lesson) -> None:
    last = MODULES[lesson.module()].read_text(encoding="utf-8").split("\n\n\n")[-1]
    block = ['if __name__ == "__main__":', "from playground.console.script import run_lesson"]
    assert [line.strip() for line in last.splitlines() if line] == [*block, f'run_lesson("{lesson.name}")']


def body(lesson: str) -> list[str]:
    """The lines of a lesson's `run`."""
    source = (ROOT / "lessons" / lesson / "lesson.py").read_text(encoding="utf-8")
    return re.split(r"\n\n\n(?:def |if )", source.split("def run")[1])[0].rstrip().splitlines()


def test_from_sgd_to_ddp_two_lines_change() -> None:
    import difflib

    lines = [line for line in difflib.ndiff(body("sgd"), body("ddp")) if line[0] in "+-"]
    assert [re.sub(r"\s+", " ", line) for line in lines] == [
        "- broadcast_parameters(model)",
        "+ model = DistributedDataParallel(model)",
        "- average_gradients(model)",
    ]


def test_sgd_by_hand_is_whole_in_one_file() -> None:
    source = (ROOT / "lessons" / "sgd" / "lesson.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    for line in ("partition_dataset(", "Net()", "loss", ".backward()", "average_gradients(model)", "optimizer.step()"):
        assert line in source
    assert "dist.all_reduce(param.grad" in source


def test_data_parallel_is_whole_in_one_file() -> None:
    """Its four calls and the module, without a trace of whoever keeps account of what they do."""
    source = (ROOT / "lessons" / "data_parallel" / "lesson.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    for line in (
        *(f"def {part}(" for part in ("scatter", "replicate", "parallel_apply", "gather")),
        "class DataParallel(",
    ):
        assert line in source
    assert not any(name in source for name in ("account", "record", "track", "label"))
