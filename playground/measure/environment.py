"""The machine and the software that figures were measured with: without them figures say nothing."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from playground.runtime.backends import backend_of, device
from playground.runtime.host import cores


def describe() -> dict[str, Any]:
    """Plain data, asked of one rank."""
    import torch

    used = range(torch.cuda.device_count() if device().type == "cuda" else 0)
    gpus = [torch.cuda.get_device_name(number) for number in used]
    return {
        "hardware": processor(),
        "cores": cores(),
        "memory": memory("MemTotal"),
        "gpus": gpus,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **dict.fromkeys(("cuda", "nccl", "driver")),
        **backend_of().libraries(),
    }


def processor() -> str:
    """The name of the processor, as its maker gives it where the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def memory(which: str) -> int:
    """Bytes of memory: "MemTotal" or "MemAvailable". Where the system does not tell them apart, all of it."""
    try:
        found = re.search(rf"^{which}:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
