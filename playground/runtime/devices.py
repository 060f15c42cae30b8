"""Backend → device, and what this machine can do.

The backend decides the device: `gloo` moves tensors in CPU memory, `nccl` in the memory of `cuda:LOCAL_RANK`.
gloo on CUDA tensors is not offered: wrong results are on record (pytorch/pytorch#170239).
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

from playground.runtime.errors import Impossible

if TYPE_CHECKING:
    import torch

BACKENDS = ("gloo", "nccl")
SHARES_A_GPU = (2, 30)  # the first NCCL that lets several ranks use one GPU, and only when asked to
SHARE_A_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"

REFUSAL = re.compile(r"not support|nsupported|only implemented|not implemented|Cannot use ReduceOp|can't be cast")


@functools.cache
def cores() -> int:
    """CPU cores this process may use when it first asks (its affinity mask, not what the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(local_ranks: int) -> int:
    """Each rank's share of the cores, at least one: more threads than cores only wait for each other."""
    return max(1, cores() // local_ranks)


def check_backend(backend: str, local_ranks: int) -> str:
    """What to tell the user about `backend` for `local_ranks` ranks on this machine, usually nothing.

    Raises `Impossible` for an unknown backend, for nccl without a GPU, and for more ranks than GPUs when
    NCCL is too old to share one. Counts GPUs without initialising CUDA.
    """
    if backend not in BACKENDS:
        raise Impossible(f"backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    if backend == "gloo":
        return ""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise Impossible("backend nccl needs a GPU and this machine shows none: use --backend gloo")
    if local_ranks <= gpus:
        return ""
    version = nccl_version()
    if version < SHARES_A_GPU:
        raise Impossible(
            f"{local_ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}: NCCL {dotted(version)} wants a GPU for each rank "
            f"(sharing needs {dotted(SHARES_A_GPU)}): use -n {gpus} or --backend gloo"
        )
    return f"{local_ranks} ranks share {gpus} GPU{'s' * (gpus > 1)} ({SHARE_A_GPU}=1, NCCL {dotted(version)})"


def claim(backend: str, local_rank: int, local_ranks: int) -> torch.device | None:
    """Make this rank's GPU its current device, before any collective; None on CPU."""
    if backend != "nccl":
        return None
    import torch

    gpus = torch.cuda.device_count()
    if local_ranks > gpus:
        os.environ[SHARE_A_GPU] = "1"
    torch.cuda.set_device(local_rank % gpus)
    return torch.device("cuda", local_rank % gpus)


def device() -> torch.device:
    """Where this rank's tensors live: decided by the backend of the process group it is in."""
    import torch
    import torch.distributed as dist

    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refusal(error: Exception) -> str:
    """The backend's own words if `error` says that it cannot do an operation at all; empty for any other error."""
    first_line = str(error).splitlines()[0] if str(error) else ""
    return first_line if REFUSAL.search(first_line) else ""


def nccl_version() -> tuple[int, ...]:
    """The NCCL loaded here, e.g. (2, 30, 7); (0,) where torch was built without it."""
    import torch

    if not torch.distributed.is_nccl_available():
        return (0,)
    return tuple(torch.cuda.nccl.version())


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
