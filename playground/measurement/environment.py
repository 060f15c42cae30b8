"""The machine and the software of a measurement. Importing this does not import torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playground.measurement import Fields
from playground.runtime.backends import backend_of, device
from playground.runtime.host import cores


def describe() -> Fields:
    """The environment of this rank, inside a world: the processor, the cores that the rank may use,
    bytes of main memory, and the GPUs, if the backend uses any; versions, None for what the backend
    does not use."""
    import torch

    gpus = range(torch.cuda.device_count() if device().type == "cuda" else 0)
    libraries = {"cuda": None, "nccl": None, "driver": None} | backend_of().libraries()
    return {
        "hardware": processor(),
        "cores": cores(),
        "memory": memory("MemTotal"),
        "gpus": [torch.cuda.get_device_name(number) for number in gpus],
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: None if version is None else str(version) for name, version in libraries.items()},
    }


def describe_in_a_line(environment: Mapping[str, Any]) -> str:
    """What `describe` has returned."""
    memory = f"{environment['memory'] / 2**30:.0f} GiB"
    hardware = [
        *environment["gpus"],
        environment["hardware"],
        f"{environment['cores']} cores",
        memory,
    ]
    versions = [
        f"{name} {environment[name]}"
        for name in ("python", "torch", "cuda", "nccl")
        if environment[name]
    ]
    return ", ".join([*hardware, environment["os"], *versions])


def processor() -> str:
    """The name of the processor: the vendor's, if the system knows it."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def memory(which: str) -> int:
    """Bytes of memory: "MemTotal", or "MemAvailable"."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(amount) for name, amount, *_ in lines if name == f"{which}:")
