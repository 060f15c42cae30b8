"""The machine and the software that figures were measured with: without them figures say nothing.

Importing this does not import torch.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.backends import backend_of, device
from playground.runtime.host import cores


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One host, as one of its ranks sees it."""

    hardware: str
    """The name of the processor."""
    cores: int
    """CPU cores that the rank may use."""
    memory: int
    """Bytes of main memory."""
    gpus: list[str]
    """Their names; empty where the backend uses none."""
    os: str
    python: str
    torch: str
    cuda: str | None = None
    """The CUDA that torch was built for. Like those of NCCL and the driver, None where the backend uses no GPU."""
    nccl: str | None = None
    driver: str | None = None

    def __str__(self) -> str:
        """One line."""
        hardware = [*self.gpus, self.hardware, f"{self.cores} cores", f"{self.memory / 2**30:.0f} GiB"]
        software = {"python": self.python, "torch": self.torch, "cuda": self.cuda, "nccl": self.nccl}
        return ", ".join([*hardware, self.os, *(f"{name} {version}" for name, version in software.items() if version)])


def describe() -> Environment:
    """The environment of this rank. Must be called inside a world: its backend says which devices it uses."""
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
    """The name of the processor, as its maker gives it where the system knows it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def memory(which: str) -> int:
    """Bytes of memory: "MemTotal", or "MemAvailable", in a container no more than it may still take.

    Where the system does not tell them apart, all of it.
    """
    try:
        found = re.search(rf"^{which}:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if not found:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    amount = int(found[1]) * 1024
    return min([amount, *container_headroom()]) if which == "MemAvailable" else amount


def container_headroom(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The bytes that this process's container may still take; empty where there is no limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (and v1, whose files have other names)
    """
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return [max(0, int((root / limit).read_text()) - int((root / usage).read_text()))]
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return []
