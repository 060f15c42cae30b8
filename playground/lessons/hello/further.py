"""What a rank runs on: its device, and the libraries and the hardware below it."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device
from playground.runtime.backends import backend_of


def what_is_here(rank: int, size: int) -> dict[str, object]:
    """What a rank runs on. `implementation` is the class behind the backend's name (for nccl, torch
    has two); `ranks_there` says how many ranks share this rank's hardware: the GPU, or the CPUs of
    its host."""
    backend = backend_of()
    mine = (socket.gethostname(), backend.hardware())
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    return {
        "device": str(device()),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),  # plain data: torch has a class of its own for this
        "implementation": backend.implementation(),
        **backend.libraries(),
        "hardware": backend.hardware() or "CPU",
        "ranks_there": everyone.count(mine),
    }
