"""The libraries of the simulated GPU, compiled once for each PyTorch and kept in the user's
cache."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from playground.base.errors import UsageError
from playground.base.files import (
    belongs_to_another,
    cache_folder,
    lock_directory,
    passing_folder,
)
from playground.base.upstream import torch_folder

HERE = Path(__file__).parent
CUDA = "libcuda.so.1"
"""The CUDA runtime, the driver and NCCL, under the name of the driver's library."""
KERNELS = "kernels.so"
"""The kernels, and the record of memory."""
LIBRARIES = {
    CUDA: [
        "-O1",
        "runtime.cpp",
        "streams.cpp",
        "races.cpp",
        "pinned.cpp",
        "lines.cpp",
        "driver.cpp",
        "refusals.cpp",
        "nccl.cpp",
        f"-Wl,-soname,{CUDA}",
    ],
    KERNELS: [
        "-O1",
        "kernels.cpp",
        "composed.cpp",
        "attention.cpp",
        "memory.cpp",
        "-lc10",
        "-lc10_cuda",
        "-ltorch_cpu",
    ],
}
"""By library: its sources, and what else the compiler is told."""
COMPILER = "g++"
TO_INSTALL = "sudo apt-get install g++ (Debian, Ubuntu) or sudo dnf install gcc-c++ (Fedora)"


class CannotBeBuilt(UsageError):
    """There is no compiler here, or no CUDA in this PyTorch."""


def build() -> Path:
    """The folder with the libraries for the PyTorch that is installed. The first use compiles them.

    Raises `UsageError`, and `CannotBeBuilt` where something has to be installed first.
    """
    torch, folder = find_torch_with_cuda(), libraries_folder()
    sources = sorted(file for ending in ("cpp", "h") for file in HERE.glob(f"**/*.{ending}"))
    content = b"".join(file.read_bytes() for file in sources) + repr(LIBRARIES).encode()
    about = (f"torch-{version('torch')}", platform.machine(), hashlib.sha256(content).hexdigest())
    built = folder / "-".join(about)[:80]
    if built.exists():
        return built
    if not shutil.which(COMPILER):
        raise CannotBeBuilt(f"simulated GPUs are compiled with {COMPILER}: {TO_INSTALL}")
    try:
        with lock_directory(folder, "the folder of simulated GPUs", "XDG_CACHE_HOME"):
            if not built.exists():  # else another process has built it meanwhile
                with passing_folder(folder, ".unfinished-") as unfinished:
                    whole = unfinished / "libraries"
                    whole.mkdir()
                    compile_into(whole, torch)
                    whole.rename(built)
    except OSError as error:
        raise cannot_be_kept(folder, error.strerror or str(error)) from None
    return built


def find_torch_with_cuda() -> Path:
    """PyTorch's folder. Raises `CannotBeBuilt` where its build has no CUDA."""
    if not (folder := torch_folder()):
        raise CannotBeBuilt("simulated GPUs need PyTorch: pip install torch torchvision")
    torch = Path(folder)
    if not (torch / "lib" / "libc10_cuda.so").exists():
        installed = version("torch")
        raise CannotBeBuilt(
            f"PyTorch {installed} is built for CPUs alone, and simulated GPUs need the build with "
            f"CUDA: pip install --force-reinstall torch=={installed.partition('+')[0]} torchvision"
        )
    return torch


def libraries_folder() -> Path:
    """The folder of the libraries for every PyTorch. Raises `UsageError` where there can be none,
    and where it is another user's, whose libraries would run."""
    try:
        folder = cache_folder() / "simulated-gpu"
        folder.mkdir(parents=True, exist_ok=True)
    except RuntimeError:
        raise cannot_be_kept(Path("~/.cache"), "there is no home directory") from None
    except OSError as error:
        raise cannot_be_kept(folder, error.strerror or str(error)) from None
    if belongs_to_another(folder, own=os.geteuid()):
        raise cannot_be_kept(folder, "it is another user's")
    if re.search(r"[\s:]", str(folder)):
        raise cannot_be_kept(folder, "LD_PRELOAD takes no space and no colon")
    return folder


def cannot_be_kept(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"simulated GPUs cannot be kept in {folder} ({why}): choose another folder with "
        "XDG_CACHE_HOME"
    )


def compile_into(folder: Path, torch: Path) -> None:
    """Compile the libraries. Raises `UsageError` with the compiler's first error."""
    packages = torch.parent / "nvidia"
    includes = [
        HERE / "include",
        torch / "include",
        packages / "nccl" / "include",
        *packages.glob("cu*/include"),
    ]
    command = [
        *(COMPILER, "-std=c++20", "-shared", "-fPIC", f"-L{torch / 'lib'}"),
        *(f"-I{include}" for include in includes),
    ]
    print(
        f"playground: compiling simulated GPUs for PyTorch {version('torch')}, once: this takes "
        "up to a minute",
        file=sys.stderr,
    )
    jobs = [
        subprocess.Popen(
            [*command, *words, "-o", str(folder / library)],
            cwd=HERE, stderr=subprocess.PIPE, text=True, errors="replace",
        )
        for library, words in LIBRARIES.items()
    ]  # fmt: skip
    try:
        said = [job.communicate()[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    if any(job.returncode for job in jobs):
        lines = [line for each in said for line in each.splitlines()]
        error = next((line for line in lines if "error" in line), *lines[:1] or ["no word"])
        raise UsageError(
            f"{COMPILER} cannot compile simulated GPUs for PyTorch {version('torch')}: {error}"
        )
    (folder / "libnvidia-ml.so.1").symlink_to(CUDA)
