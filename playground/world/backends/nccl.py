"""nccl: between GPUs, a GPU for each rank, or, from NCCL 2.30 on, one for several.

The checks before any rank starts do not initialise CUDA in the calling process.
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from playground.base.errors import UsageError
from playground.base.upstream import carrier_of, list_groups
from playground.world.backends.backend import Backend

if TYPE_CHECKING:
    import torch

SHARES_A_GPU = (2, 30)
"""The first NCCL that lets several ranks use one GPU, and only when it is told to."""
MAY_SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
SHARES = MAY_SHARE | {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
"""Ranks on one GPU must all have room for their kernels at once, or they deadlock; and NVLS, the
reduction inside the switch, ends a program that shares."""
ENDS_SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""When an operation has timed out, torch's watchdog waits four times this long, 60 s by default,
before it ends the rank: for all ranks to write what they have recorded."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that chooses among the GPUs of this machine."""

ENDED_BY_WATCHDOG = (
    "was ended by NCCL's watchdog (SIGABRT): an operation did not end within the timeout, because "
    "not every rank took part in it; the log above tells which (of ProcessGroupNCCL2 only with "
    "TORCH_DIST_USE_NCCL2=0)"
)
OWN_GPU = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
"""What to call where each rank is to use its own GPU."""
OWN_GPU_FIRST = f"{OWN_GPU} before anything is put on a GPU"
TAKE_OWN_GPU = f"call {OWN_GPU_FIRST}"
SIMULATE = "python -m playground run -n 2 --gpus 2 FILE simulates GPUs on a machine without"
MOVE_TO_GPU = (
    "nccl takes tensors on GPUs: move it, tensor.cuda(), or let gloo take those on the CPU, "
    'init_process_group("cpu:gloo,cuda:nccl")'
)


class Nccl(Backend):
    name = "nccl"
    device_type = "cuda"
    summary = "GPUs"
    interface_variable = "NCCL_SOCKET_IFNAME"
    log_level = "ERROR"  # when its watchdog ends a rank, what it logs is all there is to be known
    batches_messages = True
    may_be_kept = False  # what a communicator leaves on the device goes with its process
    # torch keeps the batch that is being collected in one place for all threads
    allows_threads = False
    # it waits in the driver, for the device, and no connection that ends changes that
    stuck_limit = 0.0
    loads_kernels_late = True  # CUDA_MODULE_LOADING=LAZY, the default since CUDA 12.2
    may_differ = "NCCL's NVLS, for one, may add in any order: try NCCL_NVLS_ENABLE=0"
    deaths = MappingProxyType({signal.SIGABRT: ENDED_BY_WATCHDOG})
    lacks_device = (
        "nccl2? requires at least one CUDA device|no GPUs found|doesn't have NCCL built in"
    )
    shared_device = r"Duplicate GPU detected : rank (\d+) and rank (\d+)"
    cures = MappingProxyType({
        "tensor not on device passed to init_process_group": TAKE_OWN_GPU,
        r"Expected tensor on cuda:\d+ but found tensor on cuda": TAKE_OWN_GPU,
        r"Expected .*tensor on (cuda:\d+|CUDA) but found tensor on cpu": MOVE_TO_GPU,
        "No backend type associated with device type cpu": MOVE_TO_GPU,
        "Tensors must be CUDA and dense": MOVE_TO_GPU,
        "Found no NVIDIA driver|No CUDA GPUs are available": SIMULATE,
        "Torch not compiled with CUDA enabled": SIMULATE,
        "recvbuff is in the memory of the CPU": MOVE_TO_GPU,  # simulated GPUs
    })  # fmt: skip
    refusals = (*Backend.refusals, "requires a group with a CPU-capable backend")

    def find_cure(self, error: str) -> str:
        if "invalid device ordinal" in error:
            return cure_missing_gpu(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return super().find_cure(error)

    def check(self, local_ranks: int, joined: bool = False) -> str:
        """As in `Backend`. Refused: a torch without NCCL, no GPU, and more ranks than GPUs
        where NCCL is too old to share one."""
        if local_ranks <= count_simulated_gpus():
            return ""  # known without importing torch, which takes a second
        import torch

        if not torch.distributed.is_nccl_available():
            raise UsageError(
                f"backend nccl is not part of this torch ({torch.__version__}): use --backend gloo"
            )
        gpus = torch.cuda.device_count()
        if not gpus:
            raise UsageError(
                "backend nccl needs a GPU and this machine shows none: use --backend gloo, or "
                "simulate some with --gpus 2"
            )
        if local_ranks <= gpus or only_nccl_can_tell(gpus, joined):
            return ""
        several = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        version = nccl_version()
        if version < SHARES_A_GPU:
            raise UsageError(
                f"{local_ranks} ranks on {several}: NCCL {format_version(version)} wants a GPU for "
                "each rank "
                f"(sharing needs {format_version(SHARES_A_GPU)}): use -n {gpus} or --backend gloo"
            )
        how = f"NCCL_MULTI_RANK_GPU_ENABLE=1, NCCL {format_version(version)}"
        return f"{local_ranks} ranks share {several} ({how})"

    def claim_device(self, local_rank: int, local_ranks: int, joined: bool = False) -> torch.device:
        import torch

        gpus = torch.cuda.device_count()
        shares = MAY_SHARE if only_nccl_can_tell(gpus, joined) else SHARES
        for name, value in (ENDS_SOON | shares if local_ranks > gpus else ENDS_SOON).items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(local_rank % gpus)
        return torch.device("cuda", local_rank % gpus)

    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def connects_later(self) -> bool:
        return True

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def abort_groups(self) -> None:
        import torch

        for group in list_groups():
            with contextlib.suppress(RuntimeError):
                carrier_of(group, torch.device("cuda")).abort()

    def describe_overlap(self) -> str:
        if self.implementation() != "ProcessGroupNCCL2":
            return ""
        return (
            "torch's ProcessGroupNCCL2 may have backward wait for each message of "
            "DistributedDataParallel, which then hides nothing: compare with TORCH_DIST_USE_NCCL2=0"
        )

    def explain_init_failure(self, error: Exception) -> str:
        said, last = super().explain_init_failure(error), last_error()
        return said if last in said else f"{said}: {last}"

    def libraries(self) -> dict[str, object]:
        import torch

        return {
            "cuda": torch.version.cuda,
            "nccl": format_version(nccl_version()),
            "driver": driver_version(),
        }


def only_nccl_can_tell(gpus: int, joined: bool) -> bool:
    """Whether the one GPU in sight may be this rank's own: Slurm can show each of its tasks a
    different one."""
    return joined and gpus == 1


def count_simulated_gpus() -> int:
    """The simulated GPUs that this process sees; 0 where the user chooses among them."""
    from playground.base.host import SIMULATED_GPUS

    return int(os.environ.get(SIMULATED_GPUS, 0)) if VISIBLE not in os.environ else 0


def driver_supports() -> tuple[int, int] | None:
    """The newest CUDA that the GPU's driver knows, e.g. (13, 0); None where there is no driver."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000, version.value % 1000 // 10
    return None


def driver_version() -> str:
    """The GPU driver's own version, e.g. "580.65.06"; empty where it does not say."""
    text = ctypes.create_string_buffer(80)
    with contextlib.suppress(OSError, AttributeError):
        management = ctypes.CDLL("libnvidia-ml.so.1")
        if management.nvmlInit_v2() == 0:
            management.nvmlSystemGetDriverVersion(text, len(text))
            management.nvmlShutdown()
    return text.value.decode()


def nccl_version() -> tuple[int, ...]:
    """The NCCL that is loaded, e.g. (2, 30, 7); (0,) where torch was built without it.

    `torch.cuda.nccl.version()` is the one that torch was compiled with: a newer library, installed
    or preloaded, goes unnoticed. It is asked only where NCCL is no library of its own, but part of
    torch's.
    """
    import torch

    if not torch.distributed.is_nccl_available():
        return (0,)
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if find_function("ncclGetVersion")(ctypes.byref(version)) == 0:
            return version.value // 10_000, version.value // 100 % 100, version.value % 100
    return tuple(torch.cuda.nccl.version())


def find_function(name: str) -> Any:
    """One of the NCCL in use, a preloaded one first. Raises `OSError` or `AttributeError` if there
    is none."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return getattr(ctypes.CDLL("libnccl.so.2"), name)


def last_error() -> str:
    """NCCL's words on its last failure in this process, in one line; empty without a failure.

    torch's ProcessGroupNCCL2 only says its kind ("invalid usage"). Source:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclgetlasterror
    """
    with contextlib.suppress(OSError, AttributeError):
        get_last_error = find_function("ncclGetLastError")
        get_last_error.restype = ctypes.c_char_p
        return " ".join((get_last_error(None) or b"").decode(errors="replace").split())
    return ""


def format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def cure_missing_gpu(ranks: int) -> str:
    """What to do in one of so many ranks of a host that has asked for a GPU which is not there."""
    import torch

    simulated = count_simulated_gpus()
    gpus = simulated or torch.cuda.device_count()
    if ranks <= gpus:
        return TAKE_OWN_GPU
    kind = "simulated GPU" if simulated else "GPU"
    cure = f"--gpus {ranks}" if simulated else f"start {gpus} on this host"
    return f"{ranks} ranks, {gpus} {kind}{'s' if gpus != 1 else ''}: {cure}"
