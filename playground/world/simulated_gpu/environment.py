"""Simulated GPUs for a process: the environment that it has to start with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from playground.base.host import SIMULATED_GPUS
from playground.world.simulated_gpu.build import CUDA, KERNELS, build

GPUS = SIMULATED_GPUS
MEMORY = "PLAYGROUND_SIMULATED_GPU_MB"
"""The environment variable with the memory of each, in units of 2^20 bytes."""


def environment_with(
    gpus: int, memory: int | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """`environ` with what has a new process see so many simulated GPUs, each with so many bytes of
    memory. What is in it already is not added again. Raises `UsageError`: see `build`."""
    folder = build()
    library = str(folder / CUDA)
    preloaded = [word for word in environ.get("LD_PRELOAD", "").split() if word != library]
    searched = environ.get("LD_LIBRARY_PATH", "").split(":")
    searched = [word for word in searched if word not in ("", str(folder))]
    return {
        **environ,
        GPUS: str(gpus),
        **({MEMORY: str(memory >> 20)} if memory else {}),
        "LD_PRELOAD": " ".join([library, *preloaded]),
        "LD_LIBRARY_PATH": ":".join([str(folder), *searched]),
    }


def kernels() -> Path:
    """The library of the kernels, in a process that sees simulated GPUs."""
    return Path(os.environ["LD_PRELOAD"].split()[0]).with_name(KERNELS)


def has_begun_with(environ: Mapping[str, str]) -> bool:
    """Whether this process sees the GPUs of an environment that `environment_with` has made."""
    library = os.path.realpath(environ["LD_PRELOAD"].split()[0])
    is_loaded = library in Path("/proc/self/maps").read_text()
    return is_loaded and all(os.environ.get(name) == environ.get(name) for name in (GPUS, MEMORY))
