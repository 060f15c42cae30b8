"""The machine and the software of a measurement. Importing this does not import torch."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.backends import backend_of, device
from playground.runtime.host import cores


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment of one rank."""

    hardware: str
    """The name of the processor."""
    cores: int
    """Number of CPU cores that the rank may use."""
    memory: int
    """Bytes of main memory."""
    gpus: list[str]
    """Names of the GPUs; empty if the backend uses none."""
    os: str
    python: str
    torch: str
    cuda: str | None = None
    """Version of CUDA that torch was built for. None, like those of NCCL and the driver, if the backend uses no GPU."""
    nccl: str | None = None
    driver: str | None = None

    def __str__(self) -> str:
        """One line."""
        hardware = [*self.gpus, self.hardware, f"{self.cores} cores", f"{self.memory / 2**30:.0f} GiB"]
        software = {"python": self.python, "torch": self.torch, "cuda": self.cuda, "nccl": self.nccl}
        return ", ".join([*hardware, self.os, *(f"{name} {version}" for name, version in software.items() if version)])


def describe() -> Environment:
    """The environment of this rank. Must be called inside a world, whose backend determines the devices."""
    import torch

    libraries = backend_of().libraries().items()
    gpus = range(torch.cuda.device_count() if device().type == "cuda" else 0)
    return Environment(
        hardware=processor(),
        cores=cores(),
        memory=memory("MemTotal"),
        gpus=[torch.cuda.get_device_name(number) for number in gpus],
        os=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        **{name: None if version is None else str(version) for name, version in libraries},
    )


def processor() -> str:
    """The name of the processor: the vendor's, if the system knows it."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def memory(which: str) -> int:
    """Bytes of memory: "MemTotal", or "MemAvailable"."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(amount) for name, amount, *_ in lines if name == f"{which}:")
