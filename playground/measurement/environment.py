"""The machine and the software of a measurement. Importing this does not import torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from playground.base.host import cores
from playground.world.backends import backend_of, device


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions are None for what the backend does not use."""

    hardware: str
    """Name of the processor."""
    cores: int
    """Number of cores that a rank may use."""
    memory: int
    """Bytes of main memory."""
    gpus: Sequence[str]
    """Names of the GPUs, if the backend uses any."""
    os: str
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None

    def __str__(self) -> str:
        hardware = (*self.gpus, self.hardware, f"{self.cores} cores")
        versions = {"python": self.python, "torch": self.torch, "cuda": self.cuda}
        versions["nccl"] = self.nccl
        named = (f"{name} {version}" for name, version in versions.items() if version)
        return ", ".join([*hardware, f"{self.memory / 2**30:.0f} GiB", self.os, *named])


def describe() -> Environment:
    """The environment of this rank, inside a world."""
    import torch

    gpus = range(torch.cuda.device_count() if device().type == "cuda" else 0)
    libraries = backend_of().libraries()

    def version(name: str) -> str | None:
        return None if libraries.get(name) is None else str(libraries[name])

    return Environment(
        hardware=processor(),
        cores=cores(),
        memory=memory("MemTotal"),
        gpus=[torch.cuda.get_device_name(number) for number in gpus],
        os=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=version("cuda"),
        nccl=version("nccl"),
        driver=version("driver"),
    )


def processor() -> str:
    """The name of the processor: the vendor's, if the system knows it."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def memory(which: str) -> int:
    """Bytes of memory: "MemTotal", or "MemAvailable"."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(amount) for name, amount, *_ in lines if name == f"{which}:")
