"""Building the simulated GPU: once, by one process at a time, and in one line where it cannot
be. No GPU is needed, and nothing is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ENOUGH

from playground.base.frames import PACKAGE, RUNNERS
from playground.explain import memory
from playground.world import UsageError
from playground.world.simulated_gpu import build as building
from playground.world.simulated_gpu.build import CUDA, CannotBeBuilt, build
from playground.world.simulated_gpu.environment import GPUS, environment_with

COMPILES = """#!/bin/sh
echo compiled >> "$LOG"
sleep 0.5
for word in "$@"; do if [ "$previous" = -o ]; then echo > "$word"; fi; previous=$word; done
"""
FAILS = """#!/bin/sh
echo "nccl.cpp:9:9: fatal error: nccl.h: No such file" >&2
exit 1
"""
BUILDS = """
import sys
from pathlib import Path
from playground.world.simulated_gpu import build

build.find_torch_with_cuda = lambda: Path(sys.argv[1])
print(build.build())
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`compiler(text)`: a script that is the only compiler; the cache is empty, and PyTorch has
    CUDA."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    monkeypatch.setattr(building, "find_torch_with_cuda", lambda: tmp_path / "torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))

    def replace(text: str) -> None:
        script = tmp_path / "bin" / "g++"
        script.parent.mkdir(exist_ok=True)
        script.write_text(text)
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    return replace


def test_two_processes_compile_it_once(compiler: Callable[[str], None], tmp_path: Path) -> None:
    compiler(COMPILES)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDS, str(tmp_path / "torch")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    out, said = zip(*(process.communicate(timeout=ENOUGH) for process in processes), strict=True)
    assert [process.returncode for process in processes] == [0, 0], said
    assert out[0] == out[1] == f"{build()}\n"
    assert (tmp_path / "log").read_text().split() == ["compiled"] * 2  # a library each
    assert "".join(said).count("compiling simulated GPUs for PyTorch") == 1
    folder = build()
    assert {file.name for file in folder.iterdir()} == {CUDA, "kernels.so", "libnvidia-ml.so.1"}
    assert {file.name for file in folder.parent.iterdir()} == {folder.name, ".lock"}


def test_what_the_compiler_says_is_told_and_nothing_is_kept(
    compiler: Callable[[str], None], tmp_path: Path
) -> None:
    compiler(FAILS)
    with pytest.raises(UsageError, match=r"g\+\+ cannot compile .*: nccl.cpp:9:9: fatal error"):
        build()
    assert [file.name for file in (tmp_path / "cache/playground/simulated-gpu").iterdir()] == [
        ".lock"
    ]


def test_without_a_compiler_it_says_what_to_install(
    compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBeBuilt, match=r"compiled with g\+\+: sudo apt-get install g\+\+"):
        build()


def test_a_build_of_pytorch_for_cpus_is_refused_with_the_command_that_gets_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(building, "version", lambda name: "2.14.1+cpu")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(
        CannotBeBuilt,
        match=r"2\.14\.1\+cpu is built for CPUs alone.*--force-reinstall torch==2\.14\.1 torchvis",
    ):
        build()


@pytest.mark.parametrize(
    ("folder", "why"), [("a file/x", "Not a directory"), ("a b", "takes no space")]
)
def test_a_cache_that_cannot_be_used_is_named(
    folder: str,
    why: str,
    compiler: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(COMPILES)
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
    with pytest.raises(UsageError, match=rf"{why}.* choose another folder with XDG_CACHE_HOME"):
        build()


def test_the_environment_keeps_what_is_in_it_and_takes_the_library_once(
    compiler: Callable[[str], None],
) -> None:
    compiler(COMPILES)
    given = {"LD_PRELOAD": "libfaster.so", "LD_LIBRARY_PATH": "/opt/lib:", "HOME": "/home/me"}
    once = environment_with(2, environ=given)
    library, kept = once["LD_PRELOAD"].split()
    assert (kept, once["HOME"], once[GPUS]) == ("libfaster.so", "/home/me", "2")
    assert once["LD_LIBRARY_PATH"].split(":") == [os.path.dirname(library), "/opt/lib"]
    assert environment_with(2, environ=once) == once
    assert environment_with(4, environ=once) == once | {GPUS: "4"}


def test_without_a_compiler_the_command_runs_all_the_same(
    compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It then finds no GPU, by which the tests of the GPU tier are skipped with that reason."""
    words = [sys.executable, "-m", "playground.world.simulated_gpu", "2"]
    command = [sys.executable, "-c", f"import os; print(os.environ.get({GPUS!r}))"]
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run([*words, *command], capture_output=True, text=True, timeout=ENOUGH)
    assert (done.stdout, done.returncode) == ("None\n", 0)
    assert done.stderr.startswith("no simulated GPU: ")


def test_folders_that_run_a_program_are_those_of_tracebacks() -> None:
    """What the library takes for the program's line, and what a traceback shows."""
    source = (Path(building.__file__).parent / "lines.cpp").read_text(encoding="utf-8")
    named = re.search(r"CARRIERS\[\]\{(.*?)\};", source, re.DOTALL)
    assert named
    ours = {each for each in re.findall(r'"(.*?)"', named[1]) if each.startswith("/playground/")}
    assert ours == {f"/playground/{each.removeprefix(PACKAGE)}" for each in RUNNERS}


def test_kinds_of_memory_are_those_of_its_recorder() -> None:
    """The library and `playground.explain.memory` write the same numbers into one record."""
    source = (Path(building.__file__).parent / "memory.cpp").read_text(encoding="utf-8")
    declared = re.search(r"const int64_t (UNKNOWN = .*);", source)
    assert declared
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", declared[1])}
    assert numbers == {
        "UNKNOWN": memory.OTHER,
        "GRADIENTS": memory.GRADIENTS,
        "ACTIVATIONS": memory.ACTIVATIONS,
        "OF_BACKWARD": memory.OF_BACKWARD,
        "KINDS": memory.MOST_KINDS,
    }
    assert memory.OF_BACKWARD < memory.MOST_KINDS
