"""A script or a module with its arguments: where it lies, what it imports, and, in a rank, running
it as `python` runs it under torchrun. Does not import torch.

Differences to a rank of torchrun's: it is a fork of a process that has imported torch, unless
`--spawn` is given; the store is at 127.0.0.1, and gloo and nccl are told to stay on loopback
(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); TORCH_CPP_LOG_LEVEL is FATAL, as what torch logs there is
raised as well; there is no TORCHELASTIC_ERROR_FILE, as the launcher hears of a failure from the
rank itself. Constants may have other values than the file says (`constants`).
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import shlex
import sys
import types
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

from playground.base.constants import Value, put_values
from playground.base.errors import UsageError
from playground.base.frames import add_program
from playground.base.imports import HiddenPackages, set_threads
from playground.base.remote import ROOT, file_of, syntax_errors_in_one_line
from playground.base.upstream import (
    find_modules_as_here,
    run_first_folder_as_main,
    run_module_as_main,
)
from playground.world.rendezvous.environment import RUN_ID

SHARED = {"torch", "torchvision", "torchaudio", "numpy"}
"""Packages that are imported once for all ranks: importing them reads none of a rank's files, and
what they read of its environment is read again (`HiddenPackages`)."""
PACKAGE = __name__.partition(".")[0]
COMPILER = ["torch._dynamo", "torch._inductor.compile_fx"]
"""What torch.compile imports when it is first used; a DistributedDataParallel, the first of it."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script, or a module, with its arguments."""

    name: str
    """The path of a file, of a folder or of an archive with a `__main__.py`; or the module."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    """`sys.path`, without the script's own folder, which comes first."""
    constants: tuple[tuple[str, Value], ...] = ()
    """Names of constants, and the values that they have instead of those in the file."""
    uses_device: bool = False
    """Whether its tensors are created on the device of the world's backend, and its process group
    is of that backend: a lesson's, whose file names no device, and gloo."""

    @property
    def words(self) -> list[str]:
        """Its command line, behind `python` or `torchrun` with its options."""
        name = ["-m", self.name] if self.is_module else [self.name]
        return [*name, *self.arguments]

    @property
    def is_one_file(self) -> bool:
        """Whether it is neither a folder nor an archive."""
        return self.is_module or not is_container(self.name)

    @property
    def first_folders(self) -> list[str]:
        """What `python` puts first on `sys.path`: with PYTHONSAFEPATH, no folder that others may
        write to."""
        if not self.is_module and is_container(self.name):
            return [os.path.abspath(self.name)]
        if os.environ.get("PYTHONSAFEPATH"):
            return []
        return [os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))]

    def locate(self) -> Path | None:
        """Its file; None for one that only a rank will find. Imports nothing. Raises `UsageError`
        if there is no such program."""
        if self.is_module:
            return self.locate_module()
        if not os.path.exists(self.name):
            raise UsageError(f"run {self.name}: there is no such file, in {os.getcwd()}")
        return None if zipfile.is_zipfile(self.name) else find_main(Path(self.name))

    def locate_module(self) -> Path | None:
        """The file of a module, as found on the `sys.path` that a rank will have."""
        package, *inner = self.name.split(".")
        before = sys.path[:]
        sys.path[:] = [*self.first_folders, *self.path]
        try:
            found = importlib.util.find_spec(package)
            if found is None:
                raise UsageError(f"run -m {self.name}: there is no module {package} on sys.path")
            for end in range(1, len(inner) + 1):
                places = [*(found.submodule_search_locations or [])] if found else []
                found = PathFinder.find_spec(".".join([package, *inner[:end]]), places)
        except (ImportError, KeyError, ValueError):
            return None
        finally:
            sys.path[:] = before
        if found and found.submodule_search_locations:
            return find_main(Path(next(iter(found.submodule_search_locations))))
        return Path(found.origin) if found and found.origin else None

    def find_namesake(self) -> Path | None:
        """A package or module of the program's project that has our name, if there is one."""
        places = [
            Path(folder, name)
            for folder in self.first_folders
            for name in (PACKAGE, f"{PACKAGE}.py")
        ]
        others = [each for each in places if each.resolve() != ROOT / PACKAGE]
        return next((each for each in others if each.exists()), None)

    def run(self) -> None:
        """Be, in this process, what `python` is when it runs the program."""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.modules.pop("__mp_main__", None)  # the launcher's, for processes of multiprocessing's
        sys.path[:] = [*self.first_folders, *self.path]
        sys.orig_argv[:] = [sys.executable, "-u", *self.words]
        sys.argv[:] = [self.name, *self.arguments]
        if self.is_module:
            sys.argv[0] = "-m"  # until the module is found
            run_module_as_main(self.name, self.compile if self.constants else None)
        elif is_container(self.name):
            run_first_folder_as_main()
        else:
            file = os.path.abspath(self.name)
            loader = SourceFileLoader("__main__", file)
            vars(main).update(
                __file__=file, __loader__=loader, __cached__=None, __builtins__=builtins
            )
            vars(main)["__annotations__"] = {}
            exec(self.compile(file), vars(main))

    def compile(self, file: str) -> types.CodeType:
        """The code of a file, with the values of `constants` in it."""
        source = Path(file).read_bytes()
        tree = put_values(ast.parse(source, file), dict(self.constants)) if self.constants else None
        return compile(tree or source, file, "exec", dont_inherit=True)


def is_container(name: str) -> bool:
    """Whether it is a folder or an archive, which Python runs by the `__main__.py` in it."""
    return os.path.isdir(name) or zipfile.is_zipfile(name)


def find_main(place: Path) -> Path | None:
    file = place / "__main__.py" if place.is_dir() else place
    return file if file.is_file() else None


def path_of_new_interpreter() -> tuple[str, ...]:
    """`sys.path` without the folder of this command: that of the script `playground`, or the
    working folder, which `python -m playground` looks into. It is kept if the playground lies
    there."""
    path = find_modules_as_here()
    runs_as_module = getattr(sys.modules["__main__"], "__spec__", None)
    own = os.getcwd() if runs_as_module else os.path.dirname(os.path.realpath(sys.argv[0]))
    if not sys.flags.safe_path and own in path and os.path.realpath(own) != str(ROOT):
        del path[len(path) - 1 - path[::-1].index(own)]
    return tuple(path)


def parse_program(file: Path) -> ast.Module:
    """The syntax tree of a program. Raises `UsageError` for what is no script in Python."""
    try:
        source = file.read_bytes()
        if b"\0" in source:  # of which Python says neither the file nor the line
            raise ValueError("it contains null bytes")
        with syntax_errors_in_one_line():
            return ast.parse(source, str(file))
    except (OSError, ValueError) as failure:
        raise UsageError(
            f"{file} cannot be read as a script in Python ({failure}): name one for torchrun"
        ) from None


def find_shared_imports(tree: ast.Module) -> Iterator[str]:
    """The modules that ranks import anyway, and that can be imported once for all of them."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name for name in names if name.partition(".")[0] in SHARED)
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="compile"):
                yield from COMPILER
            # torch imports its compiler when an optimizer or DDP is made
            case (
                ast.Attribute(value=ast.Name(id="torch"), attr="optim")
                | ast.ImportFrom(module="torch.optim")
                | ast.alias(name="optim" | "torch.optim" | "DistributedDataParallel")
            ):
                yield COMPILER[0]


def find_lessons(tree: ast.Module) -> Iterator[Path]:
    """The files of the lessons that a program imports: it is composed of them. What they import,
    its ranks import."""
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name.startswith(f"{PACKAGE}.lessons.") and alias.name.endswith(".lesson"):
                yield file_of(alias.name)


def describe_place(rank: int, size: int, run: str, restarts: int) -> Mapping[str, str]:
    """What torchrun says of a rank in the environment, besides what every rank of ours is told.

    Source: `_start_workers` in torch/distributed/elastic/agent/server/local_elastic_agent.py
    """
    return {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        RUN_ID: run,
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def run_program(rank: int, size: int, program: Program, run: str, restarts: int) -> None:
    """In a rank: run the program. `run` is the id of a run whose ranks we have started; empty in a
    world that somebody else has."""
    if run:
        os.environ.update(describe_place(rank, size, run, restarts))
        if os.environ.get("OMP_NUM_THREADS"):
            set_threads()
    if program.uses_device:
        from playground.world.rank.member import choose_device

        choose_device()
    if file := program.locate():
        add_program(str(file))
    HiddenPackages(sorted(SHARED), shlex.join(program.words) if rank == 0 else "")
    try:
        program.run()
    except ImportError as error:
        if (error.name or "").partition(".")[0] == PACKAGE and (theirs := program.find_namesake()):
            raise UsageError(
                f"{error}: the program's own {theirs} has the name of the package that runs it, "
                "and is not found: rename it, or use torchrun"
            ) from error
        raise
