"""The backends, by name: what differs between them is asked of these objects, and nowhere are their
names compared.

The backend decides the device: `gloo` moves tensors in CPU memory, `nccl` in the memory of
`cuda:LOCAL_RANK`. gloo on CUDA tensors is not offered: wrong results are on record
(pytorch/pytorch#170239). A new backend is one file beside these, and its line below. Importing this
does not import torch.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from playground.base.flags import check_choice
from playground.base.frames import is_raised_by_torch
from playground.world.backends.backend import Backend
from playground.world.backends.gloo import Gloo
from playground.world.backends.nccl import TAKE_OWN_GPU, Nccl

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Gloo(), Nccl())}


def get_backend(name: str) -> Backend:
    """The backend of that name. Raises `UsageError` for one that is unknown."""
    check_choice("backend", name, BACKENDS)
    return BACKENDS[name]


LEAVE_OUT = (
    "leave the backend out: torch chooses gloo here, and nccl where there are GPUs; "
    "or simulate GPUs, with --gpus"
)
"""What to do where a program asks for a backend whose device this machine does not have."""


def explain_missing_device(error: BaseException) -> str:
    """In one line, that the program asks for a backend whose device this machine does not have, if
    that is what `error` says; empty if not."""
    for backend in BACKENDS.values():
        if backend.lacks_device and re.search(backend.lacks_device, str(error)):
            return (
                f"the program asks for {backend.name}, and this machine shows no GPU: {LEAVE_OUT}"
            )
    return ""


def explain_shared_device(error: BaseException) -> str:
    """In one line, that two ranks use one GPU, if that is what `error` says; empty if not."""
    for backend in BACKENDS.values():
        found = backend.shared_device and re.search(backend.shared_device, str(error))
        if found:
            ranks = " and ".join(sorted(found.groups()))
            return f"Duplicate GPU detected: ranks {ranks} use the same GPU: {TAKE_OWN_GPU}"
    return ""


CURES = {
    r"DataLoader worker .* is killed by signal: Bus error": (
        "the shared memory is full, by which workers hand batches over: see df -h /dev/shm; give a "
        "container more (docker run --shm-size 8g), or take fewer workers or smaller batches"
    ),
    r"DataLoader worker .* is killed by signal: Killed": (
        "a worker was killed by SIGKILL, most often by the system for lack of memory: see dmesg "
        "and free -h, count the workers of all ranks and what each keeps, and take fewer of them "
        "or a smaller prefetch_factor"
    ),
    r"DataLoader worker .* is killed by signal: Segmentation fault": (
        "a library has crashed in a worker: num_workers=0 with python -X faulthandler shows where"
    ),
    "server socket has failed to listen.*EADDRINUSE": (
        "another process has this port, the launcher's store most likely: leave MASTER_ADDR and "
        "MASTER_PORT as they are set, or take a free port"
    ),
    r"network addresses of \(.*\) cannot be retrieved": (
        "no host of this name is known here: leave MASTER_ADDR as it is set, or correct it"
    ),
    r"Global rank \d+ is not part of group": (
        "src and dst are ranks of the world: name a member of the group, or pass its number in the "
        "group as group_src or group_dst"
    ),
}
"""What to do about errors of torch 2.13 to 2.15 that no backend raises (regular expressions)."""


def find_cure(error: BaseException) -> str:
    """What to do about an error of torch's; empty if that is not known."""
    said = "\n".join(map(str, (error, error.__cause__ or "", error.__context__ or "")))
    cures = (backend.find_cure(str(error)) for backend in BACKENDS.values())
    own = (cure for pattern, cure in CURES.items() if re.search(pattern, said))
    return next(filter(None, (*cures, *own)), "")


def backend_of(group: Any = None) -> Backend:
    """The backend of a process group, of the world by default."""
    import torch.distributed as dist

    return BACKENDS[dist.get_backend(group)]


def backend_for(device_type: str) -> Backend:
    """The backend that moves tensors of this kind of device ("cpu" or "cuda")."""
    return next(backend for backend in BACKENDS.values() if backend.device_type == device_type)


def device() -> Any:
    """Where this rank's tensors live (a `torch.device`): decided by the backend of the world it is
    in; outside of one, as in a script that forms its own, on the CPU."""
    import torch
    import torch.distributed as dist

    return backend_of().device() if dist.is_initialized() else torch.device("cpu")


def on_device() -> contextlib.AbstractContextManager[Any]:
    """As a context manager: what a program makes without naming a device (`torch.zeros(1)`) lies on
    this rank's. On a CPU it does nothing, and so costs nothing."""
    import torch

    here = device()
    return contextlib.nullcontext() if here.type == "cpu" else torch.device(here)


def synchronize() -> None:
    """Wait until this rank's device has done what it was given: before a clock is read, for a GPU
    runs behind."""
    backend_of().synchronize()


def refusal(error: Exception) -> str:
    """The backend's own words if `error` says that it cannot do an operation at all; empty for any
    other error.

    An error that somebody else has raised is not the backend's, whatever it says.
    """
    return backend_of().refusal(error) if is_raised_by_torch(error) else ""
