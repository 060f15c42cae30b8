"""A program's import of torch, in a rank that has torch already: the program may first have set
variables that torch reads when it is imported. Does not import torch.

Until the program imports one of the packages that are imported once for all ranks, `sys.modules`
does not hold them. At that import they are put back, and what the program has set since they were
read is read again. Some variables can be read only once, as OpenMP and torch's C++ do: those that a
script sets to constants at its top are set before the packages are imported for all ranks
(`find_settings`). What else has no effect is told in one line.

Source: the calls of `getenv` during `import torch` and `import numpy` (torch 2.15, numpy 2.3)
"""

from __future__ import annotations

import ast
import importlib.abc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from importlib.machinery import ModuleSpec
from types import ModuleType

from playground.base.upstream import read_allocator_again, read_jit_again, read_logs_again

environment = dict(os.environ)
"""The variables that this process imports, or has imported, these packages under."""
ONCE = re.compile(
    r"(GOMP|OMP|KMP|MKL|MKLDNN|DNNL|ONEDNN|OPENBLAS|GOTO|NPY|NUMPY|KINETO)_(?!NUM_THREADS$)\w+"
    r"|(OPENBLAS|GOTO)_NUM_THREADS"
    r"|TORCH_(SHOW_CPP_STACKTRACES|CUSTOM_TERMINATE|ALLOW_TF32_CUBLAS_OVERRIDE|SYMMMEM|TRACE|DTRACE"
    r"|DEVICE_BACKEND_AUTOLOAD|CUDA_SANITIZER|CUDAGRAPH_GC|FAKE_TENSOR_DEBUG|LOGS_FORMAT"
    r"|(LINALG|BLAS|ROCM_FA)_PREFER_\w+|COMPILE_\w+|DISABLE_NATIVE_\w+|DISTRIBUTED_USE_TORCHCOMMS)"
    r"|PYTORCH_JIT_\w+|PYTORCH_SUM_INNER_TREE|TORCHDYNAMO_\w+|TORCHEXPORT_\w+"
)
"""Names of variables that are read when a package is imported, and cannot be read again."""
OF_COMPILER = re.compile(r"TORCHINDUCTOR_\w+|TRITON_\w+|AOT_\w+|INDUCTOR_\w+")
"""The same of what `torch.compile` imports."""
THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
INTERPRETER = re.compile(r"PYTHON\w+|LD_\w+|MALLOC_\w+|GLIBC_TUNABLES|LC_\w+|LANG")
"""Names of variables that the interpreter and the C library read as a process begins."""


def read_once(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that a process must have from its beginning, or from its import of torch, to
    obey them."""
    patterns = INTERPRETER, ONCE, OF_COMPILER
    found = (item for item in environ.items() if any(each.fullmatch(item[0]) for each in patterns))
    return tuple(sorted(found))


def find_settings(tree: ast.Module, environ: Mapping[str, str]) -> dict[str, str]:
    """What a program surely sets before it imports a package: constants, in statements at its top,
    of variables that can be read only once. `environ` is what it finds."""
    found: dict[str, str] = {}
    for statement in tree.body:
        if imports_package(statement):
            break
        for name, value, is_default in settings_of(statement):
            if ONCE.fullmatch(name) or OF_COMPILER.fullmatch(name):
                found[name] = environ.get(name, found.get(name, value)) if is_default else value
    return found


def imports_package(statement: ast.stmt) -> bool:
    """Whether more than the standard library is imported by this statement, or in it."""
    names = [
        alias.name
        for node in ast.walk(statement)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [
        "." * node.level + (node.module or "")
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom)
    ]
    return any(name.partition(".")[0] not in sys.stdlib_module_names for name in names)


def settings_of(statement: ast.stmt) -> Iterator[tuple[str, str, bool]]:
    """The variables that a statement sets to constants, and whether only those that are missing."""
    match statement:
        case ast.Assign(
            targets=[ast.Subscript(value=place, slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(value)),
        ) if is_environ(place):
            yield name, value, False
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=place, attr="setdefault"),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
            )
        ) if is_environ(place):
            yield name, value, True
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=place, attr="update"), args=given, keywords=named
            )
        ) if is_environ(place):
            pairs: list[tuple[object, ast.expr]] = [(each.arg, each.value) for each in named]
            for each in given:
                if isinstance(each, ast.Dict):
                    keys = [isinstance(key, ast.Constant) and key.value for key in each.keys]
                    pairs += zip(keys, each.values, strict=True)
            for key, node in pairs:
                if isinstance(key, str) and isinstance(node, ast.Constant):
                    yield key, str(node.value), False


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


class HiddenPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that this process has imported, and that its program has yet to import."""

    def __init__(self, packages: Sequence[str], command: str) -> None:
        """From now on they seem not to be imported. `command` runs the program; it is told with a
        variable that has no effect. If it is empty, nothing is told."""
        self.command = command
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in packages
        }
        for name in self.modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (module := self.modules.get(fullname)) is None or module.__spec__ is None:
            return None
        found = copy(module.__spec__)
        found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Put back the package that is imported, and all with it that it imports."""
        module = self.modules[spec.name]
        self.spec = module.__spec__
        alone = spec.name.partition(".")[0] == "numpy"
        shown = {
            name: each
            for name, each in self.modules.items()
            if not alone or name.partition(".")[0] == "numpy"
        }
        sys.modules.update(shown)
        self.modules = {name: self.modules[name] for name in self.modules.keys() - shown.keys()}
        if not alone:
            sys.meta_path.remove(self)
            if environment.get(THREADS[0]) != os.environ.get(THREADS[0]):
                set_threads()
            missed = read_again()
            if missed and self.command:
                print(
                    f"playground: {' and '.join(missed)} had been read before the program set it, "
                    f"so that has no effect: set it for the command, {missed[0]}=… {self.command}",
                    file=sys.stderr,
                )
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module what it was: it has been executed."""
        module.__spec__ = self.spec


def set_threads() -> None:
    """Give torch as many threads as it gives itself when it is imported in this environment.

    Source: `_num_threads` in aten/src/ATen/ParallelOpenMP.cpp (torch 2.15)
    """
    import torch

    given = [os.environ.get(name, "").partition(",")[0] for name in THREADS]
    numbers = [int(each) for each in given if each.isdecimal() and int(each)]
    torch.set_num_threads(numbers[0] if numbers else len(os.sched_getaffinity(0)))


def read_again() -> list[str]:
    """Have torch, which is imported, obey the variables that have changed since its import. The
    names of those that it no longer reads."""
    import torch.distributed as dist

    changed = {
        name for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
    }  # fmt: skip
    if "TORCH_DISTRIBUTED_DEBUG" in changed:
        dist.set_debug_level_from_env()
    if "PYTORCH_JIT" in changed:
        read_jit_again()
    if changed & {"TORCH_LOGS", "TORCH_LOGS_OUT"}:
        read_logs_again()
    for name in changed & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        read_allocator_again(os.environ.get(name, ""))
    has_compiler = "torch._inductor" in sys.modules
    missed = [
        name
        for name in sorted(changed)
        if ONCE.fullmatch(name) or (has_compiler and OF_COMPILER.fullmatch(name))
    ]
    was_read = {name: environment[name] for name in missed if name in environment}
    environment.clear()
    environment.update({name: os.environ[name] for name in os.environ.keys() - missed} | was_read)
    return missed
