"""Run a command where there seem to be GPUs: `python tests/simulated_gpu 2 python -m playground sgd
--backend nccl`.

torch runs unchanged, its ProcessGroupNCCL included; under it, three libraries built here take the
place of the CUDA runtime and the driver, of NCCL, and of the kernels. What is wrong on the nccl
path shows as it would on a GPU: tensors on two devices, a missing wait, messages that do not match.
How fast anything is, it cannot tell.

Needs g++; without it the command is run all the same, and finds no GPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
GPUS = "PLAYGROUND_SIMULATED_GPU"
"""The environment variable with their number; set wherever GPUs are simulated."""


def build() -> Path:
    """The folder with the libraries, compiled for the torch that is installed. Raises
    `CalledProcessError`."""
    sources = sorted(HERE.glob("**/*.cpp")) + sorted(HERE.glob("**/*.h"))
    state = version("torch").encode() + b"".join(source.read_bytes() for source in sources)
    folder = HERE / "build" / hashlib.sha256(state).hexdigest()[:16]
    if folder.exists():
        return folder
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    [place] = find_spec("torch").submodule_search_locations  # type: ignore[misc, union-attr]
    torch = Path(place)
    packages = torch.parent / "nvidia"
    includes = [
        HERE / "include",
        torch / "include",
        packages / "nccl" / "include",
        *packages.glob("cu*/include"),
    ]
    compile_ = ["g++", "-std=c++20", "-shared", "-fPIC", *(f"-I{include}" for include in includes)]
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name)
        libraries = {
            "libcuda.so.1": [
                "-O1",
                "runtime.cpp",
                "driver.cpp",
                "nccl.cpp",
                "-Wl,-soname,libcuda.so.1",
            ],
            "kernels.so": [
                "-O0",
                "kernels.cpp",
                f"-L{torch / 'lib'}",
                "-lc10",
                "-lc10_cuda",
                "-ltorch_cpu",
            ],
        }
        jobs = [
            subprocess.Popen([*compile_, *words, "-o", str(made / library)], cwd=HERE)
            for library, words in libraries.items()
        ]
        for job in jobs:
            if job.wait():
                raise subprocess.CalledProcessError(job.returncode, job.args)
        (made / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
        made.rename(folder)
        made.mkdir()  # for the context manager to remove
    return folder


def main() -> None:
    gpus, command = sys.argv[1], sys.argv[2:]
    environ = dict(os.environ)
    if shutil.which("g++"):
        folder = build()
        preloaded = [str(folder / "libcuda.so.1"), *environ.get("LD_PRELOAD", "").split()]
        searched = [str(folder), *filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))]
        environ |= {
            GPUS: gpus,
            "LD_PRELOAD": " ".join(preloaded),
            "LD_LIBRARY_PATH": ":".join(searched),
        }
    else:
        print("no simulated GPU: there is no g++ to build it with", file=sys.stderr)
    os.execvpe(command[0], command, environ)


if __name__ == "__main__":
    main()
